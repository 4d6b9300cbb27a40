"""Random calls of the operators, kernels against fp64, values and gradients: it finds what is compiled wrongly.

    python tools/fuzz_gpu.py [--seconds N] [--seed S] [--workers W] [--device cuda] [--only causal,hybrid] [--count N]
    python tools/fuzz_gpu.py --case causal-0-3-17

Each of W processes draws a stream of cases of its own. A failure is printed when it happens, with the name that runs
the case again. A process that loses its GPU or dies is replaced by one that goes on behind the case that did it. After
so many seconds, or cases of a process, no further one starts. ``--workers 0`` stays in this process, ``--device cpu``
takes tiny cases, in Triton's interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_cases import KINDS, case_of, name_of
from waiting import run_all

ROOT = Path(__file__).parent.parent
GRACE = 60  # seconds for cases that run when the time is up: compilers take long
PROGRESS = 30  # seconds between two lines about it
SHOWN_LINES = 12
MARK = "fuzz: "  # what a process says about its cases, among what else is printed in it
LOST = 3  # exit status of a process that lost its GPU
Event = dict[str, Any]


class Run:
    """What all processes said so far."""

    def __init__(self) -> None:
        self.start, self.lock = time.time(), threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[str] = []

    def hear(self, event: Event) -> None:
        with self.lock:
            if event["outcome"] == "started":
                return
            kind = event["case"].partition("-")[0]
            self.counts[kind, event["outcome"]] += 1
            if event["outcome"] == "refused":
                self.reasons[event["text"]] += 1
            if event["outcome"] == "failed":
                self.failures.append(f"FAILED {event['case']}\n    {event['text']}")
                self.print(self.failures[-1])

    def print(self, text: str) -> None:
        print(f"[{time.time() - self.start:4.0f} s] {text}", flush=True)

    def tell(self) -> None:
        with self.lock:
            self.print(f"{self.total('passed')} passed, {self.total('failed')} failed")

    def total(self, outcome: str) -> int:
        return sum(count for (_, known), count in self.counts.items() if known == outcome)

    def summary(self) -> int:
        outcomes = "passed", "failed", "refused"
        failed = ["\n".join(text.splitlines()[:2]) for text in self.failures]
        print("\n".join(["", *failed, "", f"{'':14}" + "".join(f"{outcome:>9}" for outcome in outcomes)]))
        for kind in KINDS:
            if any(self.counts[kind, outcome] for outcome in outcomes):
                print(f"{kind:14}" + "".join(f"{self.counts[kind, outcome]:9}" for outcome in outcomes))
        print("".join(f"refused {count} times: {reason}\n" for reason, count in self.reasons.most_common()), end="")
        print(
            ", ".join(f"{self.total(outcome)} {outcome}" for outcome in outcomes),
            f"in {time.time() - self.start:.0f} s",
        )
        return int(bool(self.failures) or not self.total("passed"))


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.worker is not None:
        return _work(options)
    run = Run()
    if options.case or not options.workers:
        for event in run_cases(options.case or _names(options, 0, 0), options.device):
            run.hear(event)
        return run.summary()
    parts = [threading.Thread(target=_part, args=(run, options, worker)) for worker in range(options.workers)]
    run_all(parts, PROGRESS, run.tell)
    return run.summary()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS), metavar="KIND,KIND")
    parser.add_argument("--count", type=int)
    parser.add_argument("--case", action="append", metavar="NAME")
    # Of a process that this one starts.
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for kind in [*options.only, *(name.partition("-")[0] for name in options.case or [])]:
        if kind not in KINDS:
            parser.error(f"a kind must be one of {', '.join(KINDS)}, got {kind!r}")
    options.until = options.until or time.time() + options.seconds
    return options


def _names(options: argparse.Namespace, worker: int, number: int) -> Iterator[str]:
    while time.time() < options.until and number != options.count:
        yield name_of(options.only, options.seed, worker, number)
        number += 1


def run_cases(names: Any, device: str) -> Iterator[Event]:
    """What became of each case, as soon as it is known; the last is the one that lost the GPU, if one did."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    import fuzz_calls

    fuzz_calls.need(device)
    for name in names:
        case = case_of(name, tiny=device == "cpu")
        yield {"case": str(case), "outcome": "started"}
        try:
            wrong = fuzz_calls.check(case, device)
            yield {"case": str(case), "outcome": "failed" if wrong else "passed", "text": "\n    ".join(wrong)}
        except Exception as problem:
            reason = fuzz_calls.refusal(problem)
            if reason:
                yield {"case": str(case), "outcome": "refused", "text": reason}
                continue
            text = "\n    ".join(traceback.format_exc(limit=-4).splitlines()[-SHOWN_LINES:])
            lost = device == "cuda" and fuzz_calls.lost_gpu()
            yield {"case": str(case), "outcome": "failed", "text": "it lost the GPU\n    " * lost + text, "lost": lost}
            if lost:
                return


def _part(run: Run, options: argparse.Namespace, worker: int) -> None:
    """One process after another: each goes on behind the case in which the last one was lost."""
    first: int | None = 0
    while first is not None and time.time() < options.until:
        first = _process(run, options, worker, first)


def _process(run: Run, options: argparse.Namespace, worker: int, first: int) -> int | None:
    """The number at which another process is to go on; None: this one came to its end."""
    known = {"worker": worker, "first": first, "until": options.until, "seed": options.seed, "device": options.device}
    known |= {"only": ",".join(options.only)} | ({} if options.count is None else {"count": options.count})
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in known.items())]
    # As many processes as cores: threads of their own would only wait for one another.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    last: Event | None = None
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
        watch = threading.Timer(max(0.0, options.until + GRACE - time.time()), process.kill)
        watch.daemon = True
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                last = json.loads(line.removeprefix(MARK))
                run.hear(last)
        status = process.wait()
        watch.cancel()
        said.seek(0)
        end = "\n    ".join(said.read().splitlines()[-SHOWN_LINES:])
    if status == 0:
        return None
    if last is None:  # it would be the same again
        run.hear({"case": f"worker-{worker}", "outcome": "failed", "text": f"it ended with status {status}\n    {end}"})
        return None
    if last["outcome"] == "started":
        why = "was still running when the time was up" if time.time() > options.until else f"ended with status {status}"
        run.hear({"case": last["case"], "outcome": "failed", "text": f"it {why}\n    {end}"})
    return int(last["case"].split()[0].rpartition("-")[2]) + 1


def _work(options: argparse.Namespace) -> int:
    last: Event = {}
    for last in run_cases(_names(options, options.worker, options.first), options.device):
        print(MARK + json.dumps(last), flush=True)
    return LOST if last.get("lost") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
