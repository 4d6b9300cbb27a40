"""Which form served each call of the algebra: what ``explain`` says, heard while a model runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linattn.ops import choice
from linattn.ops.choice import Choice


@contextmanager
def watch_choices() -> Iterator[list[Choice]]:
    """The choices of all calls inside, in order; for code that is not compiled, which asks no more.

    Every op imports ``choose`` by name, so each holds one to be replaced.
    """
    right, heard = choice.choose, list[Choice]()

    def listening(*args: Any, **options: Any) -> Choice:
        found = right(*args, **options)
        heard.append(found)
        return found

    owners = [m for name, m in list(sys.modules.items()) if name.startswith("linattn.ops.") and _has(m, right)]
    for module in owners:
        module.choose = listening  # type: ignore[attr-defined]
    try:
        yield heard
    finally:
        for module in owners:
            module.choose = right  # type: ignore[attr-defined]


def _has(module: object, function: object) -> bool:
    return getattr(module, "choose", None) is function
