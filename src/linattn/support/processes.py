"""Worker processes that end with their parent."""

import os
import threading
import time

SECONDS_BETWEEN_LOOKS = 0.2


def end_with_parent() -> None:
    """Let this process end when the process that started it is gone.

    Otherwise a worker whose parent was killed would go on beside the next one that the user starts.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
