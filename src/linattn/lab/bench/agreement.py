"""Checks that the forms agree: reference, recurrent and chunked in fp64, in values, gradients and hand-over."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from linattn.lab.bench.contenders import make_contenders
from linattn.lab.bench.inputs import Inputs, make_inputs
from linattn.lab.bench.passes import grad_like, values_and_gradients
from linattn.lab.bench.settings import DECAYS, BenchConfig
from linattn.ops.linear.api import linear_attention, linear_attention_step, linear_attention_with_state
from linattn.ops.maps import EluPlusOne

# fp64 has 16 digits; another order of sums over a few hundred tokens loses a few of them, a wrong formula loses all.
TOLERANCE = 1e-10
FORMS = ("reference", "recurrent", "chunked")


@dataclass(frozen=True)
class Agreement:
    """Largest difference between any two forms."""

    decay: str
    causal: bool
    values: float
    gradients: float

    @property
    def ok(self) -> bool:
        return self.values <= TOLERANCE and self.gradients <= TOLERANCE


@dataclass(frozen=True)
class HandOver:
    """Largest difference between the whole sequence and its parts, for one way of cutting it."""

    cut: str
    difference: float

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCE


def compare_forms(decay: str, causal: bool, length: int = 130) -> Agreement:
    """Compare all forms; of 130 tokens, chunks are full except the last one."""
    config = _small(decay, causal)
    inputs = make_inputs(config, length)
    grad = grad_like(inputs, config.seed)
    outputs: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for contender in make_contenders(config):
        if contender.name in FORMS:
            leaves = inputs.copies(requires_grad=True)
            output, own = values_and_gradients(contender.run, leaves, contender.uses, grad)
            outputs.append(output)
            gradients.append(own)
    per_name = (_spread([g[name] for g in gradients]) for name in gradients[0])
    return Agreement(decay, causal, _spread(outputs), max(per_name))


def compare_all_forms() -> list[Agreement]:
    return [compare_forms(decay, causal) for causal in (True, False) for decay in DECAYS]


def compare_hand_over(length: int = 130) -> list[HandOver]:
    """Compare a causal sequence with a decay per token to its pieces of several sizes, and to single tokens."""
    inputs = make_inputs(_small("token", causal=True), length)
    whole = linear_attention(
        inputs.q, inputs.k, inputs.v, causal=True, log_decay=inputs.log_decay, feature_map=EluPlusOne()
    )
    found = []
    for cuts in ((1,), (64,), (65, 129), (7, 20, 21, 100)):
        parts = _in_parts(inputs, [0, *cuts, length])
        found.append(HandOver("cut at " + ", ".join(map(str, cuts)), _spread([whole, parts])))
    return [*found, HandOver("token by token", _spread([whole, _step_by_step(inputs)]))]


def _in_parts(inputs: Inputs, bounds: list[int]) -> Tensor:
    outputs, state = [], None
    for start, stop in pairwise(bounds):
        part = inputs.cut(start, stop)
        output, state = linear_attention_with_state(
            part.q, part.k, part.v, causal=True, log_decay=part.log_decay, feature_map=EluPlusOne(),
            initial_state=state,
        )  # fmt: skip
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _step_by_step(inputs: Inputs) -> Tensor:
    outputs, state = [], None
    assert inputs.log_decay is not None
    for t in range(inputs.length):
        output, state = linear_attention_step(
            inputs.q[:, :, t], inputs.k[:, :, t], inputs.v[:, :, t], state, log_decay=inputs.log_decay[:, :, t],
            feature_map=EluPlusOne(),
        )  # fmt: skip
        outputs.append(output)
    return torch.stack(outputs, dim=2)


def _small(decay: str, causal: bool) -> BenchConfig:
    return BenchConfig(impl=FORMS, batch=2, heads=2, head_dim=8, causal=causal, decay=decay, dtype="float64")


def _spread(tensors: list[Tensor]) -> float:
    """Largest difference between any two tensors; a NaN anywhere gives NaN, which no tolerance admits."""
    stacked = torch.stack(tensors)
    return (stacked.amax(0) - stacked.amin(0)).max().item()
