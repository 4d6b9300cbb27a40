"""The gradient of decays per channel, summed over tokens as the bias of a gate gets it.

Token by token rounding may be small and yet alike: what a chunk is off by, all tokens before it are. Long sequences,
against the chunked form, which is proved against the reference elsewhere.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.channel_decay_case import BF16, FP16, Case, Decay, as_trained, at_the_limit
from kernels.device import DEVICE
from linattn.kernels.channel_decay.device import plan

# Factors of chunks that are not mild overflow before they are put aside; numpy, which runs the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
T = 512 if DEVICE == "cpu" else 4096

CASES: dict[str, dict[str, Any]] = {
    "gates": {},
    "everything": {"H": 2, "normalizer": "sum", "decay_index": "key", "state": True, "initial": True},
    "divided": {"normalizer": "sum"},
    "strong": {"decay": at_the_limit},
    "narrow": {"K": 16, "V": 16},
    "fp16": {"dtype": FP16},
}


def summed(found: dict[str, Tensor]) -> Tensor:
    return found["d log_decay"].sum((0, 2))


@pytest.mark.parametrize("span", [T, T // 2])
@pytest.mark.parametrize("name", CASES)
def test_rounding_does_not_add_up(name: str, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms over channels: each is a bias of its own, and of some the sum is near 0."""
    monkeypatch.setattr(plan, "_SHORTEST", span)
    case = Case(**{"T": T, "K": 64, "V": 64, "H": 1, "H_kv": 1, "form": "chunked"} | CASES[name])
    exact = summed(case.evaluate(case.reference, torch.float64))
    plain = summed(case.evaluate(case.reference, case.dtype))
    found = summed(case.evaluate(case.kernels, case.dtype))
    error, cost = (found - exact).norm(), (plain - exact).norm()
    budget = 2 * (cost + torch.finfo(case.dtype).eps * exact.norm())
    assert error <= budget, f"error {error:.3g}, allowed {budget:.3g}"


def strong_in_one_half(noise: Tensor) -> Tensor:
    """64 channels whose chunks are all mild, and as many whose chunks are all strong."""
    return torch.where(torch.arange(noise.shape[-1]) < 64, as_trained(noise), -3 * noise.abs() - 0.5)


@pytest.mark.parametrize(("K", "decay"), [(64, as_trained), (128, strong_in_one_half)], ids=["one tile", "two tiles"])
def test_segments_begin_as_the_walk_goes_on(K: int, decay: Decay, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are rounded alike differ by digits of fp32; else the sums would by some of bf16."""
    sums = []
    for span in (64, T):
        monkeypatch.setattr(plan, "_SHORTEST", span)
        case = Case(T=256, K=K, V=64, H=1, H_kv=1, decay=decay)
        sums.append(summed(case.evaluate(case.kernels, BF16)))
    cut, whole = sums
    assert (cut - whole).norm() <= torch.finfo(BF16).eps / 8 * whole.norm()
