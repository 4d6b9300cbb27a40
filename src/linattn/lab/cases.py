"""Measures the cases of an experiment: here, in worker processes, or on a Ray cluster.

What is finished is kept in a JSON file a case, named by the hash of what the result depends on. Resuming is finding it.
"""

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from linattn.lab.screen import Screen
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.support.config import as_json, digest
from linattn.support.files import remove_halves, write_atomically
from linattn.support.machine import end_with_parent
from linattn.support.options import OptionError

Case = Mapping[str, Any]
"""What one result depends on, with every default written out: values of JSON."""
Where = Literal["here", "processes", "ray"]
Tell = Callable[[float, str], None]
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Work:
    """What a measurement is given besides its case: a folder of its own for checkpoints, and a way to tell of progress.

    ``tell(share, words)``: the share of the case that is done, from 0 to 1, and what is under way.
    """

    folder: Path
    tell: Tell = lambda share, words: None


Measure = Callable[[Case, Work], Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """A case with its result, or with the reason why it has none."""

    case: Case
    result: dict[str, Any] | None = None
    error: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """The rows of a frame: the case without its ``config``, which all cases share, beside its result, or beside
        each of the result's ``rows``."""
        case = {name: value for name, value in self.case.items() if name != "config"}
        result: dict[str, Any] = {"error": self.error} if self.result is None else self.result
        common = {name: value for name, value in result.items() if name != "rows"}
        return [{**case, **common, **row} for row in result.get("rows", [{}])]

    @property
    def reached(self) -> bool:
        """False for a case that the time did not suffice for."""
        return self.result is not None or bool(self.error)


# Results that are kept.


def kept(folder: Path, case: Case, fn: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The result of ``case`` from its file in ``folder``; where there is none, that of ``fn()``, which is then saved.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     first = kept(Path(folder), {"tokens": 16}, lambda: {"ms": 2.5})
        ...     again = kept(Path(folder), {"tokens": 16}, lambda: {"ms": 7.5})
        >>> again
        {'ms': 2.5}
    """
    found = find(folder, case)
    if found is not None:
        return found
    content = {"case": as_json(case), "revisions": revisions(case), "result": as_json(fn())}
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(case_path(folder, case).with_suffix(".json"), lambda temporary: temporary.write_text(text))
    result: dict[str, Any] = json.loads(text)["result"]
    return result


def find(folder: Path, case: Case) -> dict[str, Any] | None:
    """The result of ``case`` if its file is there."""
    path = case_path(folder, case).with_suffix(".json")
    result: dict[str, Any] | None = json.loads(path.read_text())["result"] if path.exists() else None
    return result


def case_path(folder: Path, case: Case) -> Path:
    """The path of a case without a suffix: its file has ``.json``, and its folder for checkpoints none."""
    return folder / digest({"case": case, "revisions": revisions(case)})


def revisions(value: Any) -> dict[str, int]:
    """The revision of each mechanism that a case names: results made before its results changed are not taken up."""
    if isinstance(value, str):
        return {value: mechanism_info(value).revision} if value in list_mechanisms() else {}
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return {name: number for part in parts for name, number in revisions(part).items()}


# Cases that are measured.


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How cases are run.

    ``jobs``: cases at a time, where they run in processes, each of which has one thread. ``seconds``: no case is begun
    after that; those that are left have neither a result nor an error. ``most_seconds``: a case that takes longer in a
    process is lost, with its process. ``like``: a process that has measured a case goes on with one for which this is
    the same, if there is one, so that code compiled for the first serves both.
    """

    where: Where = "here"
    jobs: int = 1
    seconds: float = math.inf
    most_seconds: float = math.inf
    like: Callable[[Case], object] = lambda case: None


def run_cases(
    cases: Sequence[Case],
    measure: Measure,
    folder: Path,
    *,
    title: Callable[[Case], str] = str,
    said: Callable[[Outcome], str] = lambda outcome: "",
    screen: Screen | None = None,
    **rules: Any,
) -> list[Outcome]:
    """Measure every case that has no result in ``folder`` yet; outcomes are in the order of ``cases``.

    Args:
        measure: a function of a module, or a method of a config, so that other processes find it. What it raises
            concerns its case alone, but for an OptionError, which ends all.
        said: words on a result, which are shown when a case is finished.
        rules: those of :class:`Rules`.
    """
    screen, own = screen or Screen(quiet=True), Rules(**rules)
    remove_halves(folder)
    outcomes = [Outcome(case, find(folder, case)) for case in cases]
    left = {number: outcome.case for number, outcome in enumerate(outcomes) if not outcome.reached}
    shares = dict.fromkeys(left, 0.0)
    start = {"here": _here, "processes": _in_processes, "ray": _on_ray}[own.where]
    with screen.progress(len(cases)) as bar:

        def told(number: int, share: float, words: str) -> None:
            shares[number] = share
            text = ": ".join(filter(None, (title(cases[number]), words)))
            bar.show(len(cases) - len(shares) + sum(shares.values()), text)

        for number, outcome in start(left, measure, folder, told, own):
            outcomes[number] = outcome
            del shares[number]
            if outcome.error:
                screen.warn(f"failed: {title(outcome.case)}: {outcome.error}")
            elif words := said(outcome):
                screen.note(words)
    return outcomes


Cases = dict[int, Case]
Told = Callable[[int, float, str], None]
Outcomes = Iterator[tuple[int, Outcome]]


def _here(cases: Cases, measure: Measure, folder: Path, told: Told, rules: Rules) -> Outcomes:
    until = time.monotonic() + rules.seconds
    for number, case in cases.items():
        if time.monotonic() > until:
            return
        told(number, 0.0, "")
        yield number, attempt(case, measure, folder, lambda *progress, number=number: told(number, *progress))


def attempt(case: Case, measure: Measure, folder: Path, tell: Tell) -> Outcome:
    """Measure and keep one case; an error becomes its outcome."""
    try:
        return Outcome(case, kept(folder, case, lambda: measure(case, Work(case_path(folder, case), tell))))
    except OptionError:
        raise  # wrong for all cases, and for the user to correct
    except (RuntimeError, ValueError, ArithmeticError, OSError) as error:
        return Outcome(case, error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


@dataclass
class _Worker:
    """A process, the line to it, and the case that it measures."""

    process: Any
    line: Connection
    number: int = -1
    begun: float = 0.0


def _in_processes(cases: Cases, measure: Measure, folder: Path, told: Told, rules: Rules) -> Outcomes:
    until, waiting, workers = time.monotonic() + rules.seconds, dict(cases), dict[Any, _Worker]()

    def give(worker: _Worker) -> None:
        """The next case for a worker, of the same kind as its last one if there is one."""
        last = cases.get(worker.number)
        alike = (n for n in waiting if last is not None and rules.like(cases[n]) == rules.like(last))
        worker.number, worker.begun = next(alike, next(iter(waiting))), time.monotonic()
        worker.line.send((waiting.pop(worker.number), measure, folder))
        told(worker.number, 0.0, "")
        workers[worker.line] = worker

    try:
        while waiting or workers:
            if time.monotonic() > until:
                waiting.clear()
            while waiting and len(workers) < rules.jobs:
                give(_start())
            late = [worker for worker in workers.values() if time.monotonic() - worker.begun > rules.most_seconds]
            for worker in late:
                worker.process.kill()
            ready: Any = wait(list(workers), timeout=SECONDS_BETWEEN_LOOKS)
            for worker in [workers[line] for line in ready]:
                try:
                    kind, value = worker.line.recv()
                except EOFError:  # it died: its case is lost, others get a new process
                    worker.process.join()
                    slow = f"it took longer than {rules.most_seconds:.0f} s" if worker in late else ""
                    kind, value = "died", Outcome(cases[worker.number], error=slow or _end(worker.process.exitcode))
                if kind == "told":
                    told(worker.number, *value)
                    continue
                del workers[worker.line]
                if kind == "wrong":
                    raise value
                yield worker.number, value
                if kind == "done" and waiting and time.monotonic() < until:
                    give(worker)
                elif kind == "done":
                    worker.line.send(None)
                    worker.process.join()
    finally:
        for worker in workers.values():
            worker.process.terminate()  # what is finished is on disk; waiting for the rest would take minutes
            worker.process.join()


def _start() -> _Worker:
    context = multiprocessing.get_context("spawn")  # a fork would copy threads that are at work
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()))
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(line: Connection, parent: int) -> None:
    """A worker: measures the cases it is sent until it gets None."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    said = 0.0

    def tell(share: float, words: str) -> None:
        nonlocal said
        if time.monotonic() - said > SECONDS_BETWEEN_LOOKS:
            said = time.monotonic()
            line.send(("told", (share, words)))

    try:
        while (task := line.recv()) is not None:
            try:
                case, measure, folder = task
                line.send(("done", attempt(case, measure, folder, tell)))
            except OptionError as error:
                line.send(("wrong", error))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone: what is finished is on disk


def _end(code: int) -> str:
    by = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the process {by}"


def _on_ray(cases: Cases, measure: Measure, folder: Path, told: Told, rules: Rules) -> Outcomes:
    """One task of Ray a case; the folder must be one that all nodes see."""
    import ray  # type: ignore[import-not-found]

    ray.init(ignore_reinit_error=True, log_to_driver=False)
    remote = ray.remote(attempt)
    waiting = {remote.remote(case, measure, folder, Work.tell): number for number, case in cases.items()}
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=SECONDS_BETWEEN_LOOKS)
        for reference in ready:
            yield waiting.pop(reference), ray.get(reference)
