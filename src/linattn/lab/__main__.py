"""``python -m linattn.lab NAME key=value ...``: a command where no library for command lines is installed."""

import sys

from linattn.lab.command import command_name, load
from linattn.lab.screen import Screen
from linattn.support.options import OptionError

if __name__ == "__main__":
    words = sys.argv[1:]
    name = command_name(words)
    if not name:
        raise SystemExit("python -m linattn.lab NAME key=value ...")
    texts = dict(word.lstrip("-").split("=", 1) for word in words[len(name.split()) :])
    try:
        config = load(name).parse({key.replace("-", "_"): text for key, text in texts.items()})
        raise SystemExit(config.run(Screen()))  # type: ignore[attr-defined]
    except OptionError as error:
        raise SystemExit(f"Error: {error}") from error
