"""A comparison on images: a vision transformer around each mechanism."""

from dataclasses import asdict
from typing import Any

import torch

from linattn.compare.cells import Cell
from linattn.compare.host import check_hosts, create_host, tokens_of
from linattn.compare.measure import measure_attention, measure_costs
from linattn.compare.runner import Runner
from linattn.compare.settings import CompareConfig
from linattn.compare.subject import OnRecord, OnStep, OnWork, Subject
from linattn.layers import Attention
from linattn.report.numbers import counted
from linattn.support.machine import describe_run
from linattn.tasks.images import ImageData, ImageFolders


class Images(Subject):
    """Top-1 of test images."""

    def __init__(self, config: CompareConfig, data: ImageData | ImageFolders) -> None:
        self.config, self.data, self.rounds = config, data, config.train.epochs

    def check(self) -> None:
        check_hosts(self.config.mechanisms, self.config.host, self.data)

    def describe(self) -> dict[str, Any]:
        return describe(self.config, self.data)

    def announce(self, meta: dict[str, Any]) -> str:
        host = meta["host"]
        return (
            f"{meta['data']['name']}, {host['size']} ViT of depth {host['depth']} and width {host['width']} at "
            f"{host['tokens']} tokens, {counted(self.rounds, 'epoch')} on {meta['device']}"
        )

    def trainer(self, on_step: OnStep, on_record: OnRecord) -> Runner:
        return Runner(self.config, self.data, on_step, on_record)

    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        return measure_costs(self.config, mechanisms, self.data, on_work)

    def attention(self, cells: list[Cell], on_work: OnWork) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        return measure_attention(self.config, self.data, cells, on_work)

    def step_words(self, epoch: int, step: int) -> str:
        return f"epoch {epoch + 1} of {self.rounds}"


def describe(config: CompareConfig, data: ImageData | ImageFolders) -> dict[str, Any]:
    """The ``meta`` of results: machine, command, data, host, budget."""
    model = create_host(config.mechanisms[0], config.host, data, 0)
    host = asdict(config.host) | {"tokens": tokens_of(model), "width": model.embed_dim, "depth": len(model.blocks)}
    heads = next(module.num_heads for module in model.modules() if isinstance(module, Attention))
    host |= {"patch_size": list(model.patch_embed.patch_size), "heads": heads}
    described = {
        "name": data.name,
        "classes": list(data.classes),
        "image_size": list(data.image_size),
        "channels": data.channels,
    }
    if isinstance(data, ImageData):
        described |= {"train": len(data.train.labels), "test": len(data.test.labels)}
    train = {name: value for name, value in asdict(config.train).items() if name not in ("seed", "lr")}
    return {
        **describe_run(torch.device(config.train.device)),
        "data": described,
        "host": host,
        "train": train | {"betas": list(config.train.betas)},
        "seeds": list(range(config.seeds)),
        "lrs": sorted(set(config.lrs)) or [config.train.lr],
    }
