"""What children of a benchmark do in tests: end well, crash, hang, break the GPU."""

import os
import signal
import time

from linattn.lab.bench.children import DeviceBrokenError
from linattn.lab.bench.kernels.floor import Ceilings
from linattn.lab.bench.kernels.rows import KernelRow
from linattn.lab.bench.models.rows import ModelRow
from linattn.lab.bench.passes import FORWARD, TRAINING


def echo(line, *words):
    for word in words:
        line.send("word", word)


def crash_until_third(line, attempt):
    line.send("attempt", attempt)
    if attempt == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if attempt == 2:
        raise DeviceBrokenError("illegal memory access")


def hang(line):
    line.send("hello", None)
    time.sleep(60)


def square_unless_odd(task, folder):
    if task % 2:
        raise ValueError(f"{task} is odd")
    if task == 4:
        os._exit(3)
    with open(f"{folder}/{task}", "w") as text:
        text.write(f"{task**2} {os.environ.get('LINATTN_TEST', '')}")
    return task**2


def break_the_gpu_at_one(task):
    if task == 1:
        raise DeviceBrokenError("illegal memory access")
    return os.getpid()


def sleep(task):
    time.sleep(task)


def race_that_crashes_once(line, config, result):
    """Its first contender takes the process down; started again, it goes on behind it."""
    case = config.selected()[0].name
    line.send("ceilings", Ceilings(1e9, 1e12))
    now = len(result.meta["runs"]) - 1
    for name in ("linattn triton", "linattn chunked"):
        if result.find(case, name, FORWARD) is None:
            line.send("begin", (case, name))
            if name == "linattn triton":
                os.kill(os.getpid(), signal.SIGKILL)
            for pass_name in (FORWARD, TRAINING):
                line.send("row", KernelRow(case, name, pass_name, median_ms=1.0, run=now))


def models_that_crash_once(line, config, result):
    case, mode = config.selected()[0], config.modes[0]
    for mechanism in config.mechanisms_of(case):
        key = (case.name, mechanism, mode)
        if result.find(*key) is None:
            line.send("begin", key)
            if mechanism == "softmax":
                os.kill(os.getpid(), signal.SIGKILL)
            row = result.checked.get(key) or ModelRow(*key, run=result.run)
            row.median_ms = 1.0
            line.send("row", row)
