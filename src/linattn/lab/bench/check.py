"""Verdicts: a row counts only if the run that times it compared it with exact values, and which form served it.

Budgets come from data: ``err <= 2 (err(plain) + eps)``, with plain the exact computation in the dtype that is timed,
and errors relative to the exact values.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.shared import call as choice
from linattn.ops.shared.call import Choice

Named = Mapping[str, Tensor]
LEAST_SHARE = 1e-2  # of a whole gradient: below this a part's own norm is mostly rounding, and no measure


class Verdict(NamedTuple):
    """The tensor of a result that uses most of its budget."""

    ok: bool
    worst: str
    error: float
    budget: float
    against: str

    def row(self) -> dict[str, Any]:
        """As rows have it; what is wrong has a status and a reason."""
        found: dict[str, Any] = {"error": self.error, "budget": self.budget, "worst_tensor": self.worst}
        if not self.ok:
            found |= {
                "status": "WRONG",
                "reason": f"{self.worst} is off by {self.error:.1e}, allowed {self.budget:.1e}",
            }
        return found | {"checked_against": self.against}


def judge(errors: Mapping[str, float], plain: Mapping[str, float], eps: float, against: str) -> Verdict:
    """The errors of a contender beside those of plain; among wrong tensors, or right ones, the fullest budget is told.

    NaN compares false and thus is wrong.
    """
    budgets = {name: 2 * (error + eps) for name, error in plain.items()}
    verdicts = [Verdict(errors[n] <= budgets[n], n, errors[n], budgets[n], against) for n in errors if n in budgets]
    return max(verdicts, key=lambda v: (not v.ok, v.error / v.budget))


def relative_errors(found: Named, exact: Named) -> dict[str, float]:
    """Largest difference over max(abs(exact)), of each tensor."""
    return {
        name: (found[name].double() - value).abs().max().item() / (value.abs().max().item() or 1.0)
        for name, value in exact.items() if name in found
    }  # fmt: skip


def by_kind(model: torch.nn.Module, found: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """The loss and, for each kind of parameter, the gradients of all blocks as one vector.

    Single numbers of a network this deep in bf16 say nothing.
    """
    parts: dict[str, list[Tensor]] = {}
    names = ["loss", *(f"gradient of {name}" for name, _ in model.named_parameters())]
    for name, value in zip(names, found, strict=True):
        if value is not None:
            parts.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(value.detach().flatten())
    return {name: torch.cat(values) for name, values in parts.items()}


def distances(found: Named, exact: Named) -> dict[str, float]:
    """Norms of differences over the norm of the exact values; infinity for what is missing."""
    norms = {name: _norm(value) for name, value in exact.items()}
    least = LEAST_SHARE * sum(norm**2 for name, norm in norms.items() if name != "loss") ** 0.5
    scales = {name: (norm if name == "loss" else max(norm, least)) or 1.0 for name, norm in norms.items()}
    apart = {name: _norm(found[name].to(value.dtype) - value) for name, value in exact.items() if name in found}
    return {name: apart.get(name, float("inf")) / scales[name] for name in exact}


def _norm(value: Tensor) -> float:
    return torch.linalg.vector_norm(value.double() if value.numel() < 2**24 else value.float()).item()


@contextmanager
def watch_choices() -> Iterator[list[Choice]]:
    """Record the choices of all calls of the ops inside, in order; compiled code chooses when it is traced.

    Every op imports ``choose`` by name, so it is replaced in each of their modules.
    """
    right, heard = choice.choose, list[Choice]()

    def listening(*args: Any, **options: Any) -> Choice:
        found = right(*args, **options)
        heard.append(found)
        return found

    modules: list[Any] = [module for name, module in list(sys.modules.items()) if name.startswith("linattn.ops.")]
    owners = [module for module in modules if getattr(module, "choose", None) is right]
    for module in owners:
        module.choose = listening
    try:
        yield heard
    finally:
        for module in owners:
            module.choose = right
