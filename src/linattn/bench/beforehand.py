"""What a result keeps of the work that several processes did before a race."""

import time
from typing import Any


def note_beforehand(run: dict[str, Any], tasks: int, done: list[dict[str, Any]], begin: float) -> None:
    """Into the entry of ``meta``'s runs: how many tasks there were and ended, and those whose "error" says why not.

    ``begin``: what ``time.perf_counter()`` said then. Files from before have a list of all under "done" instead.
    """
    run["compiled_beforehand"] = {
        "of": tasks,
        "ended": len(done),
        "seconds": round(time.perf_counter() - begin, 1),
        "failed": [task for task in done if task["error"]],
    }
