"""Notes in a result about the work that several processes did before a race."""

import time
from typing import Any


def note_beforehand(run: dict[str, Any], tasks: int, done: list[dict[str, Any]], begin: float) -> None:
    """Record in the last of ``meta``'s runs how many tasks there were and ended, and those with an "error".

    ``begin`` is what ``time.perf_counter()`` returned at the start. Older files list all tasks under "done" instead.
    """
    run["compiled_beforehand"] = {
        "of": tasks,
        "ended": len(done),
        "seconds": round(time.perf_counter() - begin, 1),
        "failed": [task for task in done if task["error"]],
    }
