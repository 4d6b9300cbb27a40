"""A run that takes a second: separable points as images, a small network with dropout, batches in memory.

Started as a program it trains in processes that kill themselves at chosen moments, or in one of several processes.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from linattn.lab.train import loop, rounds
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.config import TrainConfig
from linattn.support import checkpoint

CONFIG = TrainConfig(epochs=3, batch_size=8, lr=1e-2, warmup_epochs=1, ema_decay=0.9, seed=5, graphs=None)
STEPS = 6


class SmallBatches:
    """``STEPS`` batches an epoch of 1 x 2 x 2 images in three classes; noise is drawn anew at each step."""

    def __init__(self, config=CONFIG, rank=0, processes=1, noise=0.1):
        self.config, self.rank, self.processes, self.noise = config, rank, processes, noise
        self.steps_per_epoch = STEPS
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(3).repeat(16)
        centres = torch.randn(3, 1, 2, 2, generator=generator)
        self.images = centres[self.labels] + 0.3 * torch.randn(48, 1, 2, 2, generator=generator)

    def train(self, epoch, first_step=0):
        generator = torch.Generator().manual_seed(1000 * self.config.seed + epoch)
        order = torch.randperm(48, generator=generator).view(STEPS, self.processes, -1)
        for step in range(first_step, STEPS):
            chosen = order[step, self.rank]
            images = self.images[chosen]
            yield images + self.noise * torch.randn_like(images), self.labels[chosen]

    def test(self):
        chosen = torch.arange(self.rank, 48, self.processes)
        for part in chosen.split(10):
            yield self.images[part], self.labels[part]


class SmallNet(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        x = images.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def create_net(seed=7, **options):
    torch.manual_seed(seed)
    return SmallNet(**options)


def run(folder, config=CONFIG, net=None, batches=None, **options):
    """Train in ``folder`` with all the defaults of this file; the network and the result."""
    net = net or create_net()
    result = loop.train(net, batches or SmallBatches(config), config, Path(folder), **options)
    return net, result


def log_without_seconds(folder):
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(moment):
    """``step:E:S``: before step S of epoch E; ``log:E``: when the checkpoint knows epoch E and the log does not;
    ``half:E``: while the checkpoint after epoch E is written; ``result``: after the weights, before the result."""
    kind, *numbers = moment.split(":")
    numbers = [int(n) for n in numbers]
    if kind == "step":
        whole = SmallBatches.train

        def train(self, epoch, first_step=0):
            for step, batch in enumerate(whole(self, epoch, first_step), first_step):
                if [epoch, step] == numbers:
                    die()
                yield batch

        SmallBatches.train = train
    elif kind == "log":
        write = rounds.write_log
        rounds.write_log = lambda path, epochs: die() if len(epochs) > numbers[0] else write(path, epochs)
    elif kind == "half":
        save = torch.save

        def save_half(content, path):
            if content.get("epoch") == numbers[0] + 1:
                Path(path).write_bytes(b"half")
                die()
            save(content, path)

        torch.save = save_half
    else:
        assert kind == "result", moment
        checkpoint.write_json = die


def train_and_die(folder, every, moment):
    arrange_death(moment)
    run(folder, replace(CONFIG, checkpoint_seconds=every))


def in_processes(job, all_given):
    """Each in a process of its own that kills itself, forked before anything is computed."""
    import accelerate  # noqa: F401  # slow: once, for all that are forked
    import torch._dynamo

    torch.set_num_threads(1)
    for given in all_given:
        child = os.fork()
        if child == 0:
            job(*given)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, given


def train_in_one_of_several(folder):
    """What each process of a distributed run does."""
    config = replace(CONFIG, device="cpu")
    accelerator = create_accelerator(config)
    batches = SmallBatches(config, accelerator.process_index, accelerator.num_processes, noise=0)
    run(folder, config, create_net(dropout=0), batches, accelerator=accelerator)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "several":
        torch.set_num_threads(1)
        train_in_one_of_several(sys.argv[2])
    else:
        in_processes(train_and_die, json.loads(sys.argv[1]))
