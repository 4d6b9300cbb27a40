"""Run the tests that need a GPU in several processes: ``python tools/test_gpu.py [arguments of pytest]``.

pytest-xdist spreads them where it is installed. Where nothing can be installed each process takes every n-th test.
WORKERS=8 sets how many.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTHING_CHOSEN = 5  # pytest's status when no test was left


def main(arguments: list[str]) -> int:
    workers = int(os.environ.get("WORKERS", 0)) or max(1, min(12, (os.cpu_count() or 2) - 2))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *arguments]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    if importlib.util.find_spec("xdist"):
        return subprocess.call([*command, "--numprocesses", str(workers)], cwd=ROOT, env=environment)
    return _in_parts(command, environment, workers)


def _in_parts(command: list[str], environment: dict[str, str], workers: int) -> int:
    start, running = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(workers):
            log = Path(folder) / f"{index}.log"
            own = {**environment, "LINATTN_TEST_PART": f"{index}/{workers}"}
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*command, "-p", "no:cacheprovider"], cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT
                )
            running.append((process, log))
        failed = 0
        for index, (process, log) in enumerate(running):
            status = process.wait()
            lines = log.read_text(errors="replace").splitlines()
            broken = status not in (0, NOTHING_CHOSEN)
            failed += broken
            print("\n".join(lines if broken else lines[-1:]), flush=True)
            print(f"part {index + 1} of {workers}: {'failed' if broken else 'passed'}", flush=True)
    print(f"{workers - failed} of {workers} parts passed in {time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
