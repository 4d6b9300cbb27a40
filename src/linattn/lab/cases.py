"""Runs the cases of an experiment: here, in worker processes, or on a Ray cluster. What is finished is kept."""

import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from linattn.lab.kept import Case, case_path, find, kept
from linattn.lab.screen import Screen
from linattn.support.files import remove_halves
from linattn.support.machine import end_with_parent
from linattn.support.options import OptionError

Where = Literal["here", "processes", "ray"]
Tell = Callable[[float, str], None]
Told = Callable[[int, float, str], None]
Like = Callable[[Case], object]
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
        result = dict(self.result or {"error": self.error})
        rows = result.pop("rows", None)
        return [{**case, **result}] if rows is None else [{**case, **result, **row} for row in rows]

    def row(self) -> dict[str, Any]:
        """The case and its result as one row of a frame."""
        return {**self.case, **(self.result or {}), **({"error": self.error} if self.error else {})}

    @property
    def reached(self) -> bool:
        """False for a case that the time did not suffice for."""
        return self.result is not None or bool(self.error)


def run_cases(
    cases: Sequence[Case],
    measure: Measure,
    folder: Path,
    *,
    where: Where = "here",
    jobs: int = 1,
    fresh: bool = False,
    seconds: float = math.inf,
    most_seconds: float = math.inf,
    title: Callable[[Case], str] = str,
    said: Callable[[Outcome], str] = lambda outcome: "",
    like: Like = lambda case: None,
    screen: Screen | None = None,
) -> list[Outcome]:
    """Measure every case that has no result in ``folder`` yet; outcomes are in the order of ``cases``.

    Args:
        measure: a function of a module, or a method of a config, so that other processes find it. What it raises
            concerns its case alone, but for an OptionError, which ends all.
        jobs: cases at a time, where they run in processes, each of which has one thread.
        fresh: a process for each case, for measurements that must not disturb one another.
        seconds: no case is begun after that; those that are left have neither a result nor an error.
        most_seconds: a case that takes longer in a process is lost, with its process.
        said: words on a result, which are shown when a case is finished.
        like: a process that has measured a case goes on with one for which this is the same, if there is one, so that
            code compiled for the first serves both.
    """
    screen = screen or Screen(quiet=True)
    remove_halves(folder)
    done = {
        number: Outcome(case, found) for number, case in enumerate(cases) if (found := find(folder, case)) is not None
    }
    left = [number for number in range(len(cases)) if number not in done]
    shares = dict.fromkeys(left, 0.0)
    with screen.progress(len(cases)) as bar:

        def told(number: int, share: float, words: str) -> None:
            shares[number] = share
            text = ": ".join(filter(None, (title(cases[number]), words)))
            bar.show(len(cases) - len(shares) + sum(shares.values()), text)

        start = {"here": _here, "processes": _in_processes, "ray": _on_ray}[where]
        rules = Rules(jobs, fresh, time.monotonic() + seconds, most_seconds, like)
        for number, outcome in start(cases, left, measure, folder, told, rules):
            done[number] = outcome
            del shares[number]
            if outcome.error:
                screen.warn(f"failed: {title(outcome.case)}: {outcome.error}")
            elif words := said(outcome):
                screen.note(words)
    return [done.get(number, Outcome(case)) for number, case in enumerate(cases)]


Outcomes = Iterator[tuple[int, Outcome]]


@dataclass(frozen=True)
class Rules:
    """How cases are run: the arguments of :func:`run_cases`, with ``until`` a time of ``time.monotonic``."""

    jobs: int
    fresh: bool
    until: float
    most_seconds: float
    like: Like


def _here(cases: Sequence[Case], left: list[int], measure: Measure, folder: Path, told: Told, rules: Rules) -> Outcomes:
    for number in left:
        if time.monotonic() > rules.until:
            return
        told(number, 0.0, "")
        tell = lambda share, words, number=number: told(number, share, words)  # noqa: E731
        yield number, attempt(cases[number], measure, folder, tell)


def attempt(case: Case, measure: Measure, folder: Path, tell: Tell) -> Outcome:
    """Measure and keep one case; an error becomes its outcome."""
    try:
        return Outcome(case, kept(folder, case, lambda: measure(case, Work(case_path(folder, case), tell))))
    except OptionError:
        raise  # wrong for all cases, and for the user to correct
    except (RuntimeError, ValueError, ArithmeticError, OSError) as error:
        return Outcome(case, error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


def _in_processes(
    cases: Sequence[Case], left: list[int], measure: Measure, folder: Path, told: Told, rules: Rules
) -> Outcomes:
    waiting, workers, begun = deque(left), dict[Any, tuple[Any, int]](), dict[Any, float]()

    def give(process: Any, line: Connection, last: object = None) -> None:
        number = next((n for n in waiting if last is not None and rules.like(cases[n]) == last), waiting[0])
        waiting.remove(number)
        workers[line], begun[line] = (process, number), time.monotonic()
        line.send((number, cases[number], measure, folder))
        told(number, 0.0, "")

    try:
        while waiting or workers:
            if time.monotonic() > rules.until:
                waiting.clear()
            while waiting and len(workers) < rules.jobs:
                give(*_start())
            for line in [line for line in workers if time.monotonic() - begun[line] > rules.most_seconds]:
                process, number = workers.pop(line)
                process.kill()
                process.join()
                yield number, Outcome(cases[number], error=f"it took longer than {rules.most_seconds:.0f} s")
            ready: Any = wait(list(workers), timeout=SECONDS_BETWEEN_LOOKS)
            for line in ready:
                process, number = workers[line]
                try:
                    kind, value = line.recv()
                except EOFError:  # it died: its case is lost, others get a new process
                    process.join()
                    del workers[line]
                    yield number, Outcome(cases[number], error=_how_it_ended(process.exitcode))
                    continue
                if kind == "told":
                    told(number, *value)
                    continue
                del workers[line]
                if kind == "wrong":
                    raise value
                yield number, value
                if waiting and not rules.fresh and time.monotonic() < rules.until:
                    give(process, line, rules.like(cases[number]))
                else:
                    line.send(None)
                    process.join()
    finally:
        for process, _ in workers.values():
            process.terminate()  # what is finished is on disk; waiting for the rest would take minutes
            process.join()


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")  # a fork would copy threads that are at work
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()))
    process.start()
    theirs.close()
    return process, ours


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
            _, case, measure, folder = task
            try:
                line.send(("done", attempt(case, measure, folder, tell)))
            except OptionError as error:
                line.send(("wrong", error))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone: what is finished is on disk


def _how_it_ended(code: int) -> str:
    return (
        f"the process was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"the process ended with exit code {code}"
    )


def _on_ray(
    cases: Sequence[Case], left: list[int], measure: Measure, folder: Path, told: Told, rules: Rules
) -> Outcomes:
    """One task of Ray a case; the folder must be one that all nodes see."""
    import ray  # type: ignore[import-not-found]

    ray.init(ignore_reinit_error=True, log_to_driver=False)
    remote = ray.remote(max_calls=1 if rules.fresh else 0)(attempt)
    waiting = {remote.remote(cases[number], measure, folder, Work.tell): number for number in left}
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=SECONDS_BETWEEN_LOOKS)
        for reference in ready:
            yield waiting.pop(reference), ray.get(reference)
