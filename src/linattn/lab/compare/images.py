"""The subject of comparisons on images: a vision transformer or a pyramid around each mechanism."""

from dataclasses import asdict
from typing import Any

import torch

from linattn.lab.compare.cells import Cell
from linattn.lab.compare.host import check_hosts, create_host, describe_host
from linattn.lab.compare.measure import measure_attention, measure_costs
from linattn.lab.compare.runner import Runner
from linattn.lab.compare.settings import PYRAMID, CompareConfig
from linattn.lab.compare.subject import OnRecord, OnStep, Subject
from linattn.lab.page.numbers import counted
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.mechanism_options import own_options
from linattn.support.machine import describe_run
from linattn.support.telling import OnWork


class Images(Subject):
    """Comparison by top-1 on test images."""

    def __init__(self, config: CompareConfig, data: ImageData | ImageFolders) -> None:
        self.config, self.data, self.rounds = config, data, config.train.epochs

    def check(self) -> None:
        check_hosts(self.config.mechanisms, self.config.host, self.data)

    def describe(self) -> dict[str, Any]:
        return describe(self.config, self.data)

    def announce(self, meta: dict[str, Any]) -> str:
        return (
            f"{meta['data']['name']}, {host_words(meta['host'])}, {counted(self.rounds, 'epoch')} on {meta['device']}"
        )

    def trainer(self, on_step: OnStep, on_record: OnRecord) -> Runner:
        return Runner(self.config, self.data, on_step, on_record)

    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        return measure_costs(
            self.config.train, mechanisms, self.data, on_work,
            create=lambda name: create_host(name, self.config.host, self.data, 0),
        )  # fmt: skip

    def attention(self, cells: list[Cell], on_work: OnWork) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        return measure_attention(self.config, self.data, cells, on_work)

    def details(self, mechanism: str) -> dict[str, Any]:
        own = own_options(mechanism, self.config.host.options)
        return {"options": own} if own else {}

    def step_words(self, epoch: int, step: int) -> str:
        return f"epoch {epoch + 1} of {self.rounds}"


def describe(config: CompareConfig, data: ImageData | ImageFolders) -> dict[str, Any]:
    """The ``meta`` of results: machine, command, data, host, budget."""
    model = create_host(config.mechanisms[0], config.host, data, 0)
    host = config.host.fingerprint() | describe_host(model, data.image_size)
    options = config.host.options_by_name(config.mechanisms)
    host |= {"options": options} if options else {}
    train = {name: value for name, value in asdict(config.train).items() if name not in ("seed", "lr")}
    return {
        **describe_run(torch.device(config.train.device)),
        "data": describe_data(data),
        "host": host,
        "train": train | {"betas": list(config.train.betas)},
        "seeds": list(range(config.seeds)),
        "lrs": sorted(set(config.lrs)) or [config.train.lr],
    }


def describe_data(data: ImageData | ImageFolders) -> dict[str, Any]:
    described = {
        "name": data.name,
        "classes": list(data.classes),
        "image_size": list(data.image_size),
        "channels": data.channels,
    }
    if isinstance(data, ImageData):
        described |= {"train": len(data.train.labels), "test": len(data.test.labels)}
    return described


def host_words(host: dict[str, Any]) -> str:
    """The host of the results' ``meta`` in a few words."""
    if host.get("family") != PYRAMID:
        return f"{host['size']} ViT of depth {host['depth']} and width {host['width']} at {host['tokens']} tokens"
    tokens = ", ".join(map(str, host["tokens"]))
    return f"pyramid {host['size']} with stages {host['stages']} at {tokens} tokens"
