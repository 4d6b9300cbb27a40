"""``python -m linattn``, and the command ``linattn``."""

import sys
from importlib.util import find_spec

NEEDED = ("cyclopts", "rich", "matplotlib", "pandas", "jinja2")


def app() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"The command needs {', '.join(missing)}: pip install 'linattn[lab]'")
    from linattn.lab.command import main

    sys.exit(main())


if __name__ == "__main__":
    app()
