"""Worker processes that end with their parent."""

import os
import threading
import time

SECONDS_BETWEEN_LOOKS = 0.2


def end_with_parent(parent: int | None = None) -> None:
    """Let this process end when the process that started it is gone.

    Otherwise a worker whose parent was killed would go on beside the next one that the user starts. ``parent``: its id
    as it knows it itself; a process that was killed while its child imported modules is the parent no more.
    """
    threading.Thread(target=_watch, args=(os.getppid() if parent is None else parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
