"""The subject of comparisons of conversions."""

from dataclasses import asdict
from typing import Any

import torch

from linattn.lab.compare.conversion.models import convert_model, create_deit
from linattn.lab.compare.conversion.settings import ConversionConfig
from linattn.lab.compare.conversion.trainer import ConversionTrainer
from linattn.lab.compare.images import describe_data
from linattn.lab.compare.measure import measure_costs
from linattn.lab.compare.subject import OnRecord, OnStep, Subject
from linattn.lab.page.numbers import counted
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.mechanism_options import option_or
from linattn.support.machine import describe_run
from linattn.support.telling import OnWork


class Conversions(Subject):
    """Top-1 on test images: before the conversion, right after it, and after further training."""

    def __init__(self, config: ConversionConfig, data: ImageData | ImageFolders) -> None:
        self.config, self.data = config, data
        self.rounds = config.finetuning(0, config.train.lr).epochs

    def create(self, mechanism: str) -> torch.nn.Module:
        return convert_model(create_deit(self.config, self.data, 0), self.config, mechanism, 0)[0]

    def check(self) -> None:
        for name in self.config.mechanisms:
            try:
                self.create(name)
            except (ValueError, TypeError) as error:
                own = self.config.options.get(name, {})
                raise option_or("mechanisms", error, name, own, "model") from error

    def describe(self) -> dict[str, Any]:
        config = self.config
        model: Any = self.create(config.mechanisms[0])
        height, width = model.patch_embed.grid_size
        train = {name: value for name, value in asdict(config.train).items() if name != "seed"}
        return {
            **describe_run(torch.device(config.train.device)),
            "kind": "conversion",
            "data": describe_data(self.data),
            "host": {
                "size": f"deit_{config.size}", "patch_size": [config.patch_size] * 2, "depth": len(model.blocks),
                "width": model.embed_dim, "tokens": height * width + model.num_prefix_tokens,
            },
            "train": train | {"betas": list(config.train.betas), "epochs_after_conversion": self.rounds},
            "options": {name: dict(own) for name, own in config.options.items() if name in config.mechanisms},
            "seeds": list(range(config.seeds)),
            "lrs": sorted(set(config.lrs)) or [config.train.lr],
        }  # fmt: skip

    def announce(self, meta: dict[str, Any]) -> str:
        host = meta["host"]
        return (
            f"{meta['data']['name']}, {host['size']} of depth {host['depth']} at {host['tokens']} tokens on softmax, "
            f"{counted(self.config.train.epochs, 'epoch')}, converted and trained for "
            f"{counted(self.rounds, 'more epoch')}, on {meta['device']}"
        )

    def trainer(self, on_step: OnStep, on_record: OnRecord) -> ConversionTrainer:
        return ConversionTrainer(self.config, self.data, on_step, on_record)

    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        return measure_costs(self.config.train, mechanisms, self.data, on_work, create=self.create)

    def details(self, mechanism: str) -> dict[str, Any]:
        return {"options": dict(self.config.options.get(mechanism, {}))}

    def step_words(self, epoch: int, step: int) -> str:
        return f"epoch {epoch + 1}"
