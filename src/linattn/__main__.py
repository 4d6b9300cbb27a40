"""``python -m linattn``, and the command ``linattn``."""

from linattn.lab.cli.main import app

if __name__ == "__main__":
    app()
