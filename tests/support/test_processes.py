"""Workers do not outlive the process that they work for."""

import os
import subprocess
import sys
import time

WORKER = """
import time
from linattn.support.processes import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}])
print(worker.pid, flush=True)
worker.wait()
"""


def gone(pid: int) -> bool:
    """Also where nobody has asked for its exit status yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_worker_ends_when_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        worker = int((lines - {"ready"}).pop())
        assert not gone(worker)
        parent.kill()
    until = time.monotonic() + 20
    while not gone(worker) and time.monotonic() < until:
        time.sleep(0.1)
    left = not gone(worker)
    if left:
        os.kill(worker, 9)
    assert not left
