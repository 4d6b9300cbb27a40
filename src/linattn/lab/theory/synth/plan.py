"""The number of runs and the time they take, estimated before the first one."""

from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from linattn.lab.compare.cells import runs_to_train, sweep_cells
from linattn.lab.compare.text.costs import training_step
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.lab.page.numbers import counted
from linattn.lab.theory.synth.settings import SynthConfig
from linattn.lab.train.accelerator import matrix_products
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.hosts import create_host
from linattn.lab.train.text.network import TextNetwork

REPEATS = 3
OPTIMIZER = 1.15  # factor of a step's time: the timed step has no optimiser


class Plan(NamedTuple):
    runs: int
    seconds: float
    """Time of all runs, one after another, without starting processes, evaluation and compilation."""
    jobs: int

    def words(self) -> str:
        each = self.seconds / max(self.runs, 1)
        at_once = f", {self.jobs} at a time: {self.seconds / self.jobs:,.0f} s if they do not slow one another"
        return (
            f"{counted(self.runs, 'run')} x {each:,.1f} s of training = {self.seconds:,.0f} s"
            + (at_once if self.jobs > 1 else "")
        )  # fmt: skip


def make_plan(config: SynthConfig) -> Plan:
    """Estimate the time by a few timed steps of every model."""
    runs, seconds = 0, 0.0
    for part in config.parts.values():
        own = runs_to_train(part, Texts(part).sweep_is_final) if config.final else len(sweep_cells(part))
        runs += own
        seconds += own / len(part.mechanisms) * sum(seconds_of_runs(part).values())
    return Plan(runs, seconds, config.shared.jobs)


def seconds_of_runs(part: TextCompareConfig) -> dict[str, float]:
    """Time of one run of each contender, by name."""
    texts, train = Texts(part), part.train
    device = torch.device(train.device)
    batch = next(iter(Feed(texts.task, train, device).train())).parts[0]
    found = {}
    for name, host in texts.hosts.items():
        network = TextNetwork(create_host(host, texts.task, 0).to(device), texts.task)
        step = training_step(network, batch, train.precision)
        times = []
        with matrix_products(train.precision):
            for _ in range(REPEATS + 1):
                begin = perf_counter()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(perf_counter() - begin)
        found[name] = OPTIMIZER * train.steps * train.accumulation * median(times[1:])
    return found
