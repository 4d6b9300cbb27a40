"""Checks a step: loss and gradients against the same model with attention in plain PyTorch, in fp32 or fp64.

``err <= 2 (err(plain) + eps)``, with plain that same model in the precision that is measured. Errors are norms of
differences over the norm of the exact values, by kind of parameter and for all blocks together: single numbers of a
network this deep in bf16 say nothing.

Of a decoder only the first blocks are checked. At its start, with the output of attention normed by head, every block
amplifies rounding: after thirty blocks plain PyTorch in bf16 misses 0.2 to 3 of the gradient, after two 0.015. Instead
of a backbone, a model is checked that has as many blocks per stage as it takes to have all of its kinds of blocks.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from linattn.lab.bench.models.cases import SOFTMAX, ModelCase
from linattn.lab.bench.models.hosts import Host, create_host
from linattn.lab.bench.models.steps import ANY_SOFTMAX, make_step
from linattn.lab.bench.oracle import Verdict

LEAST_SHARE = 1e-2  # of the whole gradient: below this a kind's own norm is mostly rounding, and no measure
VISION_PIECE = 64  # images at a time
FIRST_BLOCKS = {"language": 2}
Named = dict[str, Tensor]


@contextmanager
def checked_part(host: Host, case: ModelCase) -> Iterator[None]:
    """Reduce the model to the part that is checked: its first blocks, compiled as they are, or all of it.

    A backbone is not reduced: the model that is checked in its place has ``case.checked_depth``.
    """
    blocks = host.blocks
    host.blocks = blocks[: FIRST_BLOCKS.get(case.kind)]
    try:
        yield
    finally:
        host.blocks = blocks


def exact_convolutions() -> AbstractContextManager[None]:
    """Switch cuDNN off, which rounds to tf32 and takes seconds for its plans for every new shape."""
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=False, allow_tf32=False)
    return flags


class ModelTruth:
    """The exact values for one model and batch, computed when they are first needed."""

    def __init__(
        self, case: ModelCase, mechanism: str, inputs: Tensor, targets: Tensor, seed: int, autocast: bool
    ) -> None:
        self.case, self.mechanism, self.seed, self.autocast = case, mechanism, seed, autocast
        self.inputs, self.targets = inputs, targets
        self._known: tuple[Named, dict[str, float]] | None = None

    def check(self, host: Host, found: Iterable[Tensor | None]) -> Verdict:
        """Check ``found``, what a step of ``host`` returned; both as reduced by ``checked_part``."""
        exact, budgets = self._truth()
        errors = distances(by_kind(host, found), exact)
        blocks = FIRST_BLOCKS.get(self.case.kind)
        part = f", its first {blocks} blocks" if blocks else f", {self.case.checked_part}".rstrip(", ")
        against = f"{'fp64' if self.inputs.device.type == 'cpu' else 'fp32'}, {self.case.shape}{part}"
        verdicts = [Verdict(errors[n] <= budgets[n], n, errors[n], budgets[n], against) for n in exact]
        return max(verdicts, key=lambda v: (not v.ok, v.error / v.budget))

    def _truth(self) -> tuple[Named, dict[str, float]]:
        if self._known is None:
            device = self.inputs.device
            impl = "auto" if self.mechanism == SOFTMAX else "chunked"
            depth = self.case.checked_depth
            host = create_host(self.case, self.mechanism, device, self.seed, impl=impl, depth=depth)
            with checked_part(host, self.case):
                plain = by_kind(host, self._gradients(host, self.autocast))
                with exact_convolutions():
                    exact = by_kind(host, self._gradients(host.double() if device.type == "cpu" else host, False))
            eps = torch.finfo(torch.bfloat16 if self.autocast else torch.float32).eps
            errors = distances(plain, exact)
            self._known = exact, {name: 2 * (errors[name] + eps) for name in exact}
        return self._known

    def _gradients(self, host: Host, autocast: bool) -> list[Tensor | None]:
        """Gradients in pieces of the batch, so that what eager code keeps in fp32 fits."""
        # BatchNorm uses statistics of the batch it sees: a backbone's batch stays whole.
        piece = {"vision": VISION_PIECE, "backbone": self.case.batch}.get(self.case.kind, 1)
        total: list[Tensor | None] | None = None
        for inputs, targets in zip(self.inputs.split(piece), self.targets.split(piece), strict=True):
            inputs = inputs.to(next(host.parameters()).dtype) if inputs.is_floating_point() else inputs
            share = len(inputs) / len(self.inputs)
            with sdpa_kernel(ANY_SOFTMAX):
                own = [None if g is None else share * g for g in make_step(host, host, inputs, targets, autocast)()]
            total = own if total is None else [_sum(a, b) for a, b in zip(total, own, strict=True)]
        assert total is not None
        return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def by_kind(host: Host, found: Iterable[Tensor | None]) -> Named:
    """The loss and, for each kind of parameter, the gradients of all blocks as one vector."""
    parts: dict[str, list[Tensor]] = {}
    names = ["loss", *(f"gradient of {name}" for name, _ in host.named_parameters())]
    for name, value in zip(names, found, strict=True):
        if value is not None:
            parts.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(value.detach().flatten())
    return {name: torch.cat(values) for name, values in parts.items()}


def distances(found: Named, exact: Named) -> dict[str, float]:
    norms = {name: _norm(value) for name, value in exact.items()}
    whole = sum(norm**2 for name, norm in norms.items() if name != "loss") ** 0.5
    return {
        name: _norm(found[name].to(value.dtype) - value)
        / (max(norms[name], 0.0 if name == "loss" else LEAST_SHARE * whole) or 1.0)
        if name in found
        else float("inf")
        for name, value in exact.items()
    }


def _norm(value: Tensor) -> float:
    return torch.linalg.vector_norm(value.double() if value.numel() < 2**24 else value.float()).item()
