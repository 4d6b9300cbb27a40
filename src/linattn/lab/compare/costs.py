"""Measures what contenders cost: the memory of a training step, and speeds, in turns and with their spread."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import measure_in_turns
from linattn.lab.cases import Tell
from linattn.lab.train.accelerator import matrix_products
from linattn.lab.train.captured_step import recorded

REPEATS = 5  # of measured speeds
MIN_SECONDS, MIN_REPEATS = 0.1, 3  # of each repeat
SECONDS_OF_REST = 0.5
Call = Callable[[], object]
Loss = Callable[[], tuple[Tensor, ...]]
"""The loss, and what stays in memory beside it."""


def step_costs(
    losses: Mapping[str, tuple[nn.Module, Loss]],
    counted: str,
    count: int,
    device: torch.device,
    precision: str,
    tell: Tell,
    graphs: bool = False,
) -> dict[str, dict[str, Any]]:
    """By name, the memory of forward, loss and backward, and speeds: a number for each repeat.

    So a busy moment affects all alike, as the models take turns; its share of the machine is in the costs, too.

    Args:
        losses: models with functions that compute their losses, of ``count`` times what is ``counted``.
        graphs: whether CUDA graphs are timed, as runs are trained with them.
    """
    busy, costs = busy_share(), {name: dict[str, Any]() for name in losses}
    for name, (model, loss) in losses.items():
        tell(0.0, f"{name}: memory")
        step = one_pass(model, loss, device, precision, training=True)
        if device.type == "cuda":
            step()  # in the first pass libraries allocate workspaces, which do not belong to the model
        costs[name]["peak_bytes_train"] = peak_bytes(step, device)
    for training, way in ((False, "forward"), (True, "train")):
        calls = {name: one_pass(*loss, device, precision, training=training) for name, loss in losses.items()}
        with matrix_products(precision):
            if graphs and device.type == "cuda":
                calls = {name: recorded(call, device) or call for name, call in calls.items()}
            for repeat in range(REPEATS):
                tell(0.5 + (repeat / REPEATS + training) / 4, f"{counted}s per second, {way}")
                timings = measure_in_turns(calls, device, min_seconds=MIN_SECONDS, min_repeats=MIN_REPEATS)
                for name, timing in timings.items():
                    costs[name].setdefault(f"{counted}s_per_second_{way}", []).append(count / timing.median)
    busy = max(busy, busy_share())
    return {name: cost | {"busy": busy} for name, cost in costs.items()}


def one_pass(model: nn.Module, loss: Loss, device: torch.device, precision: str, *, training: bool) -> Call:
    """The loss alone in evaluation mode, or with its gradients, which are returned, not stored."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def call() -> object:
        model.train(training)
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
        with torch.set_grad_enabled(training), autocast:
            found = loss()
        return torch.autograd.grad(found[0], parameters, allow_unused=True) if training else found

    return call


def busy_share() -> float:
    """The share of the machine's cores that is at work while this process rests; 0 where it cannot be read."""
    before = _ticks()
    time.sleep(SECONDS_OF_REST)
    idle, total = (after - earlier for after, earlier in zip(_ticks(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Idle and all ticks of the cores since the machine started."""
    try:
        values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return values[3] + values[4], sum(values)
