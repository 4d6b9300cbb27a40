"""A comparison that takes seconds, for the tests of this folder."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from linattn.lab.compare.compare import compare
from linattn.lab.compare.settings import CompareConfig, HostConfig
from linattn.lab.train.config import TrainConfig

TRAIN = TrainConfig(epochs=2, batch_size=32, lr=3e-3, warmup_epochs=1)
HOST = HostConfig("digits", patch_size=4, depth=1)


def config_for(folder: Path, **changes) -> CompareConfig:
    config = CompareConfig("digits", ("softmax", "relu"), HOST, TRAIN, 2, (), None, folder)
    return replace(config, **changes)


def run(config: CompareConfig) -> tuple[int, str]:
    screen = StringIO()
    code = compare(config, Console(file=screen, width=160))
    return code, screen.getvalue()


def results_of(config: CompareConfig) -> dict:
    return json.loads((config.output / "results.json").read_text())
