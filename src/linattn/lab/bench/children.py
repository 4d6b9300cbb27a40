"""Runs work in child processes: a crash, a hang or a broken GPU costs what the child was doing, not the run."""

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from linattn.support.processes import end_with_parent

BROKEN = 75  # exit code of a child whose GPU no longer responds, after its last report
SECONDS_BETWEEN_LOOKS = 0.5
_CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy threads and the GPU's context


class DeviceBrokenError(RuntimeError):
    """Raised if the GPU no longer responds: after an illegal access every further call of the process fails."""


def check_alive(device: torch.device) -> None:
    """Raise DeviceBrokenError if the GPU no longer responds."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:
        raise DeviceBrokenError(str(error)) from error


def supervise(
    target: Callable[..., None],
    arguments: Callable[[], tuple[Any, ...]],
    on_event: Callable[[str, Any], None],
    on_death: Callable[[str], bool],
    *,
    silent_seconds: float,
) -> None:
    """Run ``target(line, *arguments())`` in a child until it returns; pass what it sends to ``on_event(kind, value)``.

    If the child dies, or is silent for ``silent_seconds``, ``on_death(reason)`` is called; if that returns True another
    child is started, with new arguments.
    """
    while True:
        process, heard = _start(target, arguments(), {})
        try:
            reason = _listen(process, heard, on_event, silent_seconds)
        finally:
            _end(process)
            heard.close()
        if reason is None or not on_death(reason):
            return


def _listen(process: Any, heard: Connection, on_event: Callable[[str, Any], None], silent_seconds: float) -> str | None:
    """Listen until the process ends; returns why it ended, or None after a regular end."""
    last = time.monotonic()
    while True:
        if heard.poll(SECONDS_BETWEEN_LOOKS):
            try:
                kind, value = heard.recv()
            except EOFError:
                process.join()
                return _how_it_ended(process.exitcode)
            last = time.monotonic()
            if kind == "end":
                return None
            on_event(kind, value)
        elif time.monotonic() - last > silent_seconds:
            return f"no sign of life for {silent_seconds:.0f} s"


def _how_it_ended(code: int) -> str:
    if code == BROKEN:
        return "the GPU answers no more after an error"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def in_parallel(
    target: Callable[..., object],
    tasks: Sequence[Any],
    common: tuple[Any, ...],
    *,
    processes: int,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Any, Any, float, str]]:
    """Run ``target(task, *common)`` in several processes; yields ``(task, value, seconds, error)`` as tasks end.

    ``value`` is what the target returned, None after an error; ``error`` is "" without one. After ``seconds`` the tasks
    that are left are stopped and not reported. A target whose GPU no longer responds raises DeviceBrokenError, and the
    next task gets a new process, as after a crash.
    """
    waiting, workers = deque(tasks), dict[Any, tuple[Any, Any]]()
    deadline = time.monotonic() + seconds
    try:
        for _ in range(min(processes, len(waiting))):
            process, heard = _start(_work, (target, common), environment or {})
            workers[heard] = (process, waiting.popleft())
            heard.send(workers[heard][1])
        while workers and (left := deadline - time.monotonic()) > 0:
            ready: Iterable[Any] = wait(list(workers), timeout=min(left, SECONDS_BETWEEN_LOOKS))
            for heard in ready:
                process, task = workers.pop(heard)
                try:
                    _, (value, spent, error) = heard.recv()
                except EOFError:  # it died: its task is lost, the next one gets a new process
                    process.join()
                    yield task, None, 0.0, _how_it_ended(process.exitcode)
                    if waiting:
                        process, heard = _start(_work, (target, common), environment or {})
                        workers[heard] = (process, waiting.popleft())
                        heard.send(workers[heard][1])
                    continue
                yield task, value, spent, error
                if waiting:
                    workers[heard] = (process, waiting.popleft())
                    heard.send(workers[heard][1])
                else:
                    _end(process)
    finally:
        for process, _ in workers.values():
            _end(process)


def _work(line: "Line", target: Callable[..., object], common: tuple[Any, ...]) -> None:
    while True:
        task = line.receive()
        begin = time.perf_counter()
        value, error = None, ""
        try:
            value = target(task, *common)
        except DeviceBrokenError:
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        line.send("done", (value, time.perf_counter() - begin, error))


def _start(target: Callable[..., None], arguments: tuple[Any, ...], environment: Mapping[str, str]) -> tuple[Any, Any]:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_child, args=(theirs, target, arguments), daemon=False)
    with changed_environment(environment):  # a child inherits the environment at its start
        process.start()
    theirs.close()
    return process, ours


def _end(process: Any) -> None:
    if process.is_alive():
        process.terminate()
        process.join(5)
    if process.is_alive():
        process.kill()
    process.join()


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Line:
    """The child's end of the pipe to its parent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, kind: str, value: Any) -> None:
        self.connection.send((kind, value))

    def receive(self) -> Any:
        return self.connection.recv()


def _child(connection: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    line = Line(connection)
    try:
        target(line, *arguments)
    except DeviceBrokenError:
        _leave(BROKEN)
    line.send("end", None)
    _leave(0)


def _leave(code: int) -> None:
    """Exit at once: with a broken GPU a regular exit would hang or crash, and nothing is left to be done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
