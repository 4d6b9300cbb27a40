"""Runs on sequences that take a second. Started as a program it trains in processes that kill themselves."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.lab.train.small_run import die, in_processes, log_without_seconds

from linattn.lab.tasks.text import text_task
from linattn.lab.tasks.text.recall import Mqar
from linattn.lab.train import rounds
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.hosts import Host, create_host
from linattn.lab.train.text.loop import train_text

__all__ = ["CONFIG", "HOST", "TASK", "log_without_seconds", "run"]
TASK = text_task("mqar", vocab=32, length=16, pairs=4, test_examples=50)
HOST = Host(size="pico", mechanism="elu", canon="B", width=16, depth=1, dropout=0.1)
CONFIG = TextConfig(steps=7, batch_size=8, accumulation=2, lr=1e-2, warmup_steps=2, eval_every=3, seed=5, graphs=None)


def run(folder, config=CONFIG, host=HOST, task=TASK, **options):
    """Train in ``folder`` with all the defaults of this file; the model and the result."""
    model = create_host(host, task, config.seed)
    return model, train_text(model, task, config, Path(folder), **options)


def train_and_die(folder, every, moment):
    """``moment``: before which batch, or before the first line of the log."""
    if moment == "log":
        rounds.write_log = die
    else:
        make = Mqar.train_batch
        Mqar.train_batch = lambda self, size, seed, step: die() if step == moment else make(self, size, seed, step)
    run(folder, replace(CONFIG, checkpoint_seconds=every))


if __name__ == "__main__":
    import transformers  # noqa: F401  # slow: once, for all that are forked

    in_processes(train_and_die, json.loads(sys.argv[1]))
