"""Checks that two ways of taking a step give the same result from the same state."""

from collections.abc import Iterable, Mapping
from math import sqrt

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]
"""All tensors that a step changes, by name; the part of the name before the first dot is the kind of tensor."""

# Largest difference that different orders of summation can make, as a share of what a step changes.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
MOMENTS = "moments"


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: Iterable[Tensor], sums: Tensor
) -> dict[str, Tensor]:
    """The tensors that a step changes: weights, buffers, optimiser state, averages and the meter's sums; not copies."""
    found: dict[str, Tensor] = {}
    found |= {f"weights.{name}": value for name, value in model.named_parameters() if value.requires_grad}
    found |= {f"buffers.{name}": value for name, value in model.named_buffers()}
    found |= {f"average.{number}": value for number, value in enumerate(average)}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        own = optimizer.state.get(parameter, {})
        found |= {f"{MOMENTS}.{number}.{name}": value for name, value in own.items() if isinstance(value, Tensor)}
    return {**found, "sums.loss and hits": sums}


class Snapshot:
    """A copy of a state and of the random generators, from which a step can be taken again."""

    def __init__(self, state: State) -> None:
        self.values = {name: value.detach().clone() for name, value in state.items()}
        self.device = state["sums.loss and hits"].device
        self._host = torch.get_rng_state()
        self._own = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Write the copy back, in place. Moments that did not exist yet become zero, with which they begin."""
        for name, value in state.items():
            value.grad = None  # an interrupted step may have left gradients
            if name in self.values:
                value.copy_(self.values[name])
            elif name.startswith(MOMENTS):
                value.zero_()
        torch.set_rng_state(self._host)
        if self._own is not None:
            torch.cuda.set_rng_state(self._own, self.device)


@torch.no_grad()
def difference(before: Snapshot, first: Snapshot, second: State) -> dict[str, float]:
    """Difference of two ways to take a step from ``before``, by kind of tensor, as a share of what the first changed.

    Norms are over all tensors of a kind. Only for moments, which are sums of gradients and of their squares, each
    tensor has its own norm, so that no small parameter is overlooked. A gradient that is zero but for rounding is
    compared with the size of the others.
    """
    kinds: dict[str, list[Tensor]] = {}
    for name, value in second.items():
        begin = before.values.get(name)
        begin = torch.zeros_like(first.values[name]) if begin is None else begin
        changed = (first.values[name].double() - begin.double()).square().sum()
        apart = (value.detach().double() - first.values[name].double()).square().sum()
        kind = f"{MOMENTS}, {name.rsplit('.', 1)[1]}" if name.startswith(MOMENTS) else name.split(".")[0]
        kinds.setdefault(kind, []).append(torch.stack([apart, changed, torch.full_like(apart, value.numel())]))
    found: dict[str, float] = {}
    for kind, rows in kinds.items():
        table = torch.stack(rows).tolist()
        apart, changed, numbers = (sum(column) for column in zip(*table, strict=True))
        if kind.startswith(MOMENTS):
            usual = changed / max(numbers, 1)
            found[kind] = max(_share(a, c + 1e-2 * n * usual) for a, c, n in table)
        else:
            found[kind] = _share(apart, changed)
    return found


def disagreement(found: Mapping[str, float], noise: Mapping[str, float], precision: str) -> str | None:
    """Say in words what differs by more than rounding explains; ``noise`` is the difference of a step from itself."""
    for kind, share in found.items():
        # Adam's first steps are signs of gradients: where one is nearly zero, rounding can reverse the whole step.
        plain = TOLERANCE[precision]
        allowed = 2 * noise.get(kind, 0.0) + (sqrt(plain) if kind in ("weights", "average") else plain)
        if not share <= allowed:  # NaN fails too
            return f"{kind} differ by {share:.1e} of what a step changes, allowed {allowed:.1e}"
    return None


def _share(apart: float, changed: float) -> float:
    if apart == 0:
        return 0.0
    return sqrt(apart / changed) if changed else float("inf")
