"""What mechanisms cost in a model for images: parameters, operations, state, memory, and speed with its spread."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from linattn.lab.bench.cost import model_cost, throughput_in_turns, train_peak_bytes
from linattn.lab.cases import Tell
from linattn.lab.train.accelerator import matrix_products
from linattn.support.compiling import compile_blocks

REPEATS = 5
SECONDS = 0.2  # of each repeat
SECONDS_OF_REST = 0.5
BUSY = 0.15  # share of the machine's cores that other work may take unnamed


def model_costs(
    create: Callable[[str], nn.Module],
    names: list[str],
    images: Tensor,
    *,
    precision: Any,
    compile: bool,
    tell: Tell,
) -> dict[str, Any]:
    """The costs of models by name, and the share of the machine that other work took, ``busy``.

    Speeds are lists, one number for each repeat, in all of which the models take turns.
    """
    busy = busy_share()
    if compile:
        torch.compiler.reset()
    costs: dict[str, dict[str, Any]] = {}
    models = {name: create(name).to(images.device) for name in names}
    for done, (name, model) in enumerate(models.items()):
        tell(0.5 * done / len(models), f"{name}: parameters, operations, memory")
        cost = model_cost(model, (images.shape[2], images.shape[3]), images.shape[1])
        if compile:
            compile_blocks(model)  # time and memory are to be those of training
        costs[name] = {
            "parameters": cost.parameters,
            "mechanism_parameters": cost.mechanism_parameters,
            "flops": cost.flops,
            "attention_flops": cost.attention_flops,
            "state_size": cost.state_size,
            "peak_bytes_train": train_peak_bytes(model, images, precision=precision),
        }
    for training, way in ((False, "forward"), (True, "train")):
        with matrix_products(precision):
            for repeat in range(REPEATS):
                tell(0.5 + (repeat / REPEATS + training) / 4, f"images per second, {way}, {repeat + 1} of {REPEATS}")
                found = throughput_in_turns(models, images, training=training, precision=precision, min_seconds=SECONDS)
                for name, speed in found.items():
                    costs[name].setdefault(f"images_per_second_{way}", []).append(speed)
    return {"costs": costs, "busy": max(busy, busy_share())}


def speed_of(values: float | list[float] | None) -> tuple[float, float, float] | None:
    """Median, least and greatest of a speed's repeats."""
    if not values:
        return None
    values = values if isinstance(values, list) else [values]
    return median(values), min(values), max(values)


def busy_words(shares: Mapping[str, float]) -> str:
    """A sentence that names a busy machine; empty if none was."""
    most = max((share for share in shares.values() if share), default=0.0)
    return f"Other work took {100 * most:.0f} % of the machine while speed was measured." if most > BUSY else ""


def busy_share() -> float:
    """The share of the machine's cores that is at work while this process rests; 0 where it cannot be read."""
    before = _ticks()
    time.sleep(SECONDS_OF_REST)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return 0.0
    return 1 - (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """Idle and all ticks of the cores since the machine started."""
    try:
        values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return values[3] + values[4], sum(values)
