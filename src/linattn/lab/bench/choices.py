"""Records which form served each call of the algebra while a model runs, as ``explain`` would tell."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linattn.ops.shared import call
from linattn.ops.shared.call import Choice


@contextmanager
def watch_choices() -> Iterator[list[Choice]]:
    """Record the choices of all calls inside, in order; only for code that is not compiled, which chooses anew.

    Every op imports ``choose`` by name, so it is replaced in each of their modules.
    """
    right, heard = call.choose, list[Choice]()

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
