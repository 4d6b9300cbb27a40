"""The results of a comparison, as they are written to ``results.json``."""

from dataclasses import asdict, dataclass, field
from statistics import mean, stdev
from typing import Any

import torch

from linattn.compare.cells import CellResult
from linattn.compare.host import create_host, tokens_of
from linattn.compare.settings import REFERENCE, CompareConfig
from linattn.layers import Attention
from linattn.support.files import write_json
from linattn.support.machine import describe_run
from linattn.tasks.images import ImageData, ImageFolders


@dataclass
class Results:
    """Filled while a comparison goes on; :meth:`save` writes what is there."""

    config: CompareConfig
    meta: dict[str, Any]
    swept: list[CellResult] = field(default_factory=list)
    final: list[CellResult] = field(default_factory=list)
    lrs: dict[str, float] = field(default_factory=dict)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    attention: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: bool = False

    def save(self) -> None:
        write_json(self.config.output / "results.json", self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "finished": self.finished},
            "mechanisms": [self._mechanism(name) for name in self.config.mechanisms],
            "rows": [result.as_row() for result in self.final],
        }

    def _mechanism(self, name: str) -> dict[str, Any]:
        runs = [r for r in self.final if r.cell.mechanism == name]
        tried = [r for r in self.swept if r.cell.mechanism == name]
        own, reference = self.attention.get(name), self.attention.get(REFERENCE)
        gap = own["entropy"] - reference["entropy"] if own and reference else None
        return {
            "mechanism": name,
            "lr": self.lrs.get(name),
            "sweep": [{"lr": r.cell.lr, "top1": r.top1} for r in tried] or None,
            **spread([r.top1 for r in runs if r.top1 is not None]),
            "train_seconds_mean": mean_or_none([r.train_seconds for r in runs if r.train_seconds is not None]),
            **self.costs.get(name, {}),
            **(own or {}),
            "entropy_gap": gap,
        }


def spread(top1: list[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for one run), least and greatest."""
    return {
        "top1_mean": mean_or_none(top1),
        "top1_std": stdev(top1) if len(top1) > 1 else None,
        "top1_min": min(top1, default=None),
        "top1_max": max(top1, default=None),
        "runs": len(top1),
    }


def mean_or_none(values: list[float]) -> float | None:
    return mean(values) if values else None


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
