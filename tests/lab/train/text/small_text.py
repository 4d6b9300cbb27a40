"""Runs on sequences that take a second. Started as a program it trains in processes that kill themselves."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from linattn.lab.tasks.text import text_task
from linattn.lab.tasks.text.recall import Mqar
from linattn.lab.train import rounds
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.hosts import Host, create_host
from linattn.lab.train.text.loop import train_text

TASK = text_task("mqar", vocab=32, length=16, pairs=4, test_examples=50)
HOST = Host(size="pico", mechanism="elu", canon="B", width=16, depth=1, dropout=0.1)
CONFIG = TextConfig(steps=7, batch_size=8, accumulation=2, lr=1e-2, warmup_steps=2, eval_every=3, seed=5, graphs=None)


def run(folder, config=CONFIG, host=HOST, task=TASK, **options):
    """Train in ``folder`` with all the defaults of this file; the model and the result."""
    model = create_host(host, task, config.seed)
    return model, train_text(model, task, config, Path(folder), **options)


def log_without_seconds(folder):
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_step(number):
    """Before batch ``number`` is made."""
    make = Mqar.train_batch
    Mqar.train_batch = lambda self, size, seed, step: die() if step == number else make(self, size, seed, step)


def train_and_die(folder, every, moment):
    """In a process of its own, forked before anything is computed; returns how it ended."""
    child = os.fork()
    if child == 0:
        if moment == "log":
            rounds.write_log = die
        else:
            die_before_step(moment)
        run(folder, replace(CONFIG, checkpoint_seconds=every))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    # Slow to import: once, for all that are forked.
    import accelerate  # noqa: F401
    import torch._dynamo
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    for folder, every, moment in json.loads(sys.argv[1]):
        assert train_and_die(folder, every, moment) == -signal.SIGKILL, moment
