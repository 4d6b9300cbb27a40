"""Run the tests that need a GPU in several processes.

    python tools/test_gpu.py [--seconds N] [--record FILE] [arguments of pytest]

A failure is printed when it happens. A process that loses its GPU (an illegal access to memory) or dies is replaced by
one that goes on behind the test that did it. After N seconds no further test starts, and what was left is counted. What
passed is kept in FILE: started again, only the others run; delete it when the code has changed. WORKERS=8 in the
environment sets how many processes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from waiting import run_all

ROOT = Path(__file__).parent.parent
GRACE = 30  # seconds for tests that run when the time is up
SLOWEST = 15
PROGRESS = 30  # seconds between two lines about it
SOME_FAILED, NOTHING_CHOSEN = 1, 5  # pytest's exit status
SHOWN_LINES = 20
SHOWN = 40  # failures with their last lines; of more only the name is worth reading
OF_A_GPU = re.compile(r"\bgpu\b|\bPLACES\b")  # in every file with such tests, besides those of kernels


class Run:
    """What all parts said so far."""

    def __init__(self, workers: int, seconds: float | None, record: Path | None) -> None:
        self.start, self.workers, self.record = time.time(), workers, record
        self.before = set(record.read_text().splitlines()) if record and record.exists() else set()
        self.deadline = self.start + seconds if seconds else float("inf")
        self.lock = threading.Lock()
        self.tests: set[str] = set()
        self.uncollected: set[str] = set()
        self.seconds: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}
        self.troubles: list[str] = []

    def fail(self, part: int, test: str, text: str) -> None:
        if self.outcomes.get(test) == "failed":
            return
        self.outcomes[test] = "failed"
        count = sum(outcome == "failed" for outcome in self.outcomes.values())
        self.print(f"FAILED {test} (part {part})" + (f"\n{text}\n" if count <= SHOWN else ""))

    def trouble(self, text: str) -> None:
        self.troubles.append(text)
        self.print(text)

    def print(self, text: str) -> None:
        print(f"[{time.time() - self.start:4.0f} s] {text}", flush=True)

    def tell(self) -> None:
        with self.lock:
            self.print(f"{len(self.outcomes)} of {len(self.tests)} tests done")

    def hear(self, part: int, event: dict[str, Any]) -> None:
        with self.lock:
            if event["kind"] == "collected":
                if not self.tests:
                    passed = f", {event['passed']} passed before" if event["passed"] else ""
                    self.print(f"{len(event['tests'])} tests in {self.workers} processes{passed}")
                self.tests |= set(event["tests"])
            elif event["kind"] == "uncollected":
                if event["test"] not in self.uncollected:  # all parts say the same
                    self.trouble(f"cannot collect {event['test']}\n{event['text']}")
                self.uncollected.add(event["test"])
            elif event["kind"] == "lost":
                self.print(f"part {part} lost its GPU in {event['test']} and starts anew behind it")
            elif event["kind"] == "report":
                self._report(part, event)

    def _report(self, part: int, event: dict[str, Any]) -> None:
        test = event["test"]
        self.seconds[test] += event["seconds"]
        if event["outcome"] == "failed":
            self.fail(part, test, event["text"])
        elif event["outcome"] == "skipped" or event["when"] == "call":
            self.outcomes.setdefault(test, event["outcome"])
            if event["outcome"] == "skipped":
                self.print(f"SKIPPED {test} ({event['text']})")
        elif event["when"] == "teardown" and self.outcomes.get(test) == "passed" and self.record:
            with self.record.open("a") as file:
                file.write(f"{test}\n")

    def summary(self) -> int:
        print(f"\nthe slowest {SLOWEST}")
        for test, seconds in self.seconds.most_common(SLOWEST):
            print(f"{seconds:7.1f} s  {test}")
        failed = sorted(test for test, outcome in self.outcomes.items() if outcome == "failed")
        print("\n".join(["", *(f"FAILED {test}" for test in failed), *(t.splitlines()[0] for t in self.troubles)]))
        counts = Counter(self.outcomes.values())
        left = len(self.tests - self.outcomes.keys())
        whole = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {left} not run"
        busy = sum(self.seconds.values())
        if self.before:
            whole += f", {len(self.before)} passed before"
        print(f"{whole}, in {time.time() - self.start:.0f} s; the tests alone {busy:.0f} s of {self.workers} processes")
        return int(bool(failed or self.troubles or left or not counts["passed"]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--record", type=Path)
    options, rest = parser.parse_known_args(arguments)
    if not any((ROOT / argument.partition("::")[0]).exists() for argument in rest):
        rest += _files()
    run = Run(int(os.environ.get("WORKERS", 0)) or max(1, (os.cpu_count() or 2) - 1), options.seconds, options.record)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "passed").write_text("\n".join(sorted(run.before)))
        parts = [threading.Thread(target=_part, args=(run, n, folder, rest)) for n in range(run.workers)]
        run_all(parts, PROGRESS, run.tell)
    return run.summary()


def _files() -> list[str]:
    """Those that have tests for a GPU: to import all others would take longer than many a test."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [path for path in found if path.parent.name == "triton" or OF_A_GPU.search(path.read_text())]
    return [str(path.relative_to(ROOT)) for path in chosen]


def _part(run: Run, index: int, folder: str, arguments: list[str]) -> None:
    """One process after another: each goes on behind the test in which the last one was lost."""
    while True:
        last, lost, status, output = _process(run, index, folder, arguments)
        over = time.time() > run.deadline
        with run.lock:
            if last is None and status not in (0, NOTHING_CHOSEN) and not run.uncollected:
                run.trouble(f"part {index} ended with status {status} before its first test\n{output}")
            died = last is not None and last not in run.outcomes
            if died:
                why = "was still running when the time was up" if over else f"ended its process (status {status})"
                run.fail(index, str(last), f"it {why}\n{output}")
        if over or last is None or not (lost or died or status not in (0, SOME_FAILED)):
            return


def _process(run: Run, index: int, folder: str, arguments: list[str]) -> tuple[str | None, bool, int, str]:
    """The last test it started, whether it lost its GPU, its exit status, and the end of what it printed."""
    reading, writing = os.pipe()
    part = {"index": index, "folder": folder, "pipe": writing, "deadline": run.deadline, "passed": f"{folder}/passed"}
    paths = [str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LINATTN_TEST_PART": json.dumps(part),
        # As many processes as cores: threads and compilers of their own would only wait for one another.
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1"),
    }
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-p", "gpu_part"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", *arguments]
    last, lost = None, False
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, pass_fds=[writing]
        )
        os.close(writing)
        watch = threading.Timer(max(0.0, min(run.deadline + GRACE - time.time(), threading.TIMEOUT_MAX)), process.kill)
        watch.daemon = True
        watch.start()
        with os.fdopen(reading) as events:
            for line in events:
                event = json.loads(line)
                last = event["test"] if event["kind"] == "start" else last
                lost = lost or event["kind"] == "lost"
                run.hear(index, event)
        status = process.wait()
        watch.cancel()
        printed.seek(0)
        output = "\n".join(printed.read().splitlines()[-SHOWN_LINES:])
    return last, lost, status, output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
