"""Kernels of a decay per channel against fp64: decays of every size, every option, and the digits of sums."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.budget import BF16, FP16, FP32
from kernels.case import Case, checks
from kernels.device import DEVICE
from linattn import linear_attention_with_state
from linattn.kernels.channel_decay.device import plan

# Factors of chunks that are not mild overflow before they are put aside; numpy, which runs the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")


def mixed(noise: Tensor) -> Tensor:
    """Closed gates and open ones, side by side in one chunk."""
    return torch.where(noise > 1.5, -800.0, torch.where(noise > 1, -50.0, torch.where(noise < 0, 0.0, -0.1 * noise)))


def as_trained(noise: Tensor) -> Tensor:
    """As trained gates are: every chunk is mild."""
    return F.logsigmoid(noise + 3)


def at_the_limit(noise: Tensor) -> Tensor:
    """A half of 64 tokens decays by about 2^-80: chunks of both kinds side by side, and channels of both in one."""
    return -1.7 * noise.abs()


def once(noise: Tensor) -> Tensor:
    """One token forgets everything; around it digits of small decays count."""
    at = torch.arange(noise.shape[2]) == 40
    return torch.where(at[:, None], -800.0, -0.05 * noise.abs())


def strong_in_one_half(noise: Tensor) -> Tensor:
    """64 channels whose chunks are all mild, and as many whose chunks are all strong."""
    return torch.where(torch.arange(noise.shape[-1]) < 64, as_trained(noise), -3 * noise.abs() - 0.5)


def all_forget(noise: Tensor) -> Tensor:
    return torch.full_like(noise, -800.0)


def minus_fifty(noise: Tensor) -> Tensor:
    return torch.full_like(noise, -50.0)


def closed(noise: Tensor) -> Tensor:
    return torch.where(noise > 1, -torch.inf, -0.1 * noise.abs())


def nearly_none(noise: Tensor) -> Tensor:
    return -0.001 * noise.abs()


def call(dtype: torch.dtype = BF16, **options: Any) -> Case:
    known = {"T": 40, "H": 1, "decay": "channel", "causal": True, "norm": None}
    return Case(**known | {"dtype": dtype} | options)


@checks(
    *(call(dtype, T=70, H=2, H_kv=2) for dtype in (FP32, BF16, FP16)),
    *(call(dtype, T=T, H=2, H_kv=2, norm=norm, index=index) for dtype, T, norm, index in (
        (FP32, 70, "sum", "key"), (FP32, 40, "abs_max_one", "query"), (BF16, 70, "sum", "query"),
        (BF16, 70, "abs_max_one", "key"), (FP16, 40, "sum", "key"),
    )),
    call(FP32, final=True),
    call(start=True, index="key", T=70),
    call(norm="sum", start=True),
    call(FP32, start=True, norm="sum", index="key"),
    call(FP32, B=2, H=2, norm="sum", mask=True, start=True),
    *(call(H=2, norm="sum", index=index, cu=(0, 3, 3, 40, 70), start=True) for index in ("query", "key")),
    # Odd widths are padded; beyond 128 (fp32: 64) parts are added up. Of one normalised feature nothing is left.
    *(call(dtype, T=20, K=K, V=V, norm="sum" if K > 1 else None, start=True) for dtype, K, V in (
        (FP32, 5, 7), (BF16, 1, 3), (FP32, 70, 20), (BF16, 64, 128), (BF16, 130, 140),
    )),
    *(call(T=T, norm="sum", start=True, index="key") for T in (2, 32, 33)),
    *(call(B=2, layout=layout) for layout in ("tokens", "columns")),
    # Row sums and states reach 1e6; only their quotient is fp16.
    *(call(FP16, norm="sum", decay=decay, scale=100.0) for decay in (nearly_none, once)),
)  # fmt: skip
def test_values_and_gradients(case: Case) -> None:
    case.check()


SIZES: list[tuple[Callable[[Tensor], Tensor], torch.dtype]] = [
    (mixed, FP32), (once, FP32), (all_forget, FP32), (closed, FP32), (torch.zeros_like, FP32),
    (mixed, BF16), (all_forget, BF16), (minus_fifty, BF16), (torch.zeros_like, BF16),
]  # fmt: skip


@checks(
    *(call(dtype, T=50, decay=decay) for decay, dtype in SIZES),
    call(T=50, H=2, decay=mixed, norm="sum", index="key", mask=True, start=True),
)
def test_extreme_decays(case: Case) -> None:
    case.check()


@checks(
    call(FP32, T=84, norm="sum", start=True, segments=1),
    call(T=84, H=2, index="key", segments=1),
    call(FP32, T=84, decay=as_trained, final=True, segments=1),
    call(norm="sum", cu=(0, 3, 3, 84, 90), start=True, segments=1),
    call(T=200, K=64, V=64, decay=at_the_limit, index="key", mask=True, final=True, segments=1),
)
def test_segments_side_by_side(case: Case) -> None:
    """Few heads: the sequence is cut, and states are handed from segment to segment."""
    case.check()


WIDE = [
    {"decay": as_trained, "norm": "sum", "index": "key", "start": True},
    {"decay": as_trained, "H": 2, "H_kv": 2, "cu": (0, 3, 3, 90, 150), "start": True},
    {"decay": at_the_limit, "mask": True, "index": "key", "final": True},
    {"decay": mixed, "norm": "sum", "T": 130, "start": True},
]


@checks(
    *(call(**{"T": 150, "K": K, "V": V} | options) for options in WIDE
      for K, V in ([(64, 64)] if DEVICE == "cpu" else [(64, 64), (128, 64), (64, 128), (128, 128)])),
    # Outputs halve the values, gradients of queries and keys the features.
    *(call(T=T, K=128, V=128, decay=as_trained) for T in (64, 129)),
)  # fmt: skip
def test_wide_heads_of_several_chunks(case: Case) -> None:
    """From 64 features on chunks are longer, and each pass has programs of its own for parts of a head."""
    case.check()


def test_fresh_memory_is_never_read_and_runs_are_equal() -> None:
    call(H=2, norm="sum", final=True, mask=True, decay=mixed).assert_repeats()


def test_decays_are_not_copied() -> None:
    """They are as large as the keys, in fp32."""
    names: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    q, k, v, a = torch.rand(4, 1, 2, 20, 16, device=DEVICE).unbind()
    with Names():
        linear_attention_with_state(q, k, v, causal=True, log_decay=-a, normalizer=None, impl="triton")
    assert "linattn::triton_channel_decay" in names
    assert not names & {"aten::clamp", "aten::clamp_min", "aten::masked_fill", "aten::where", "aten::clone"}


# Token by token rounding may be small and yet alike: what a chunk is off by, all tokens before it are. So the gradient
# is summed over tokens, as the bias of a gate gets it, over long sequences, against the chunked form.
T = 512 if DEVICE == "cpu" else 4096


def summed(case: Case, *how: Any) -> Tensor:
    return case.evaluate(*how)["d log_decay"].double().sum((0, 2))


@pytest.mark.parametrize("span", [T, T // 2])
@checks(*(call(**{"T": T, "K": 64, "V": 64} | options) for options in (
    {},
    {"H": 2, "H_kv": 2, "norm": "sum", "index": "key", "start": True},
    {"norm": "sum"},
    {"decay": at_the_limit},
    {"K": 16, "V": 16},
    {"dtype": FP16},
)))  # fmt: skip
def test_rounding_does_not_add_up(case: Case, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms over channels: each is a bias of its own, and of some the sum is near 0."""
    monkeypatch.setattr(plan, "_SHORTEST", span)
    exact, plain, found = (summed(case, *how) for how in (("chunked", True), ("chunked",), ("triton",)))
    budget = 2 * ((plain - exact).norm() + torch.finfo(case.dtype).eps * exact.norm())
    assert (found - exact).norm() <= budget


@checks(*(call(T=256, K=K, V=64, decay=decay) for K, decay in ((64, as_trained), (128, strong_in_one_half))))
def test_segments_begin_as_the_walk_goes_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are rounded alike differ by digits of fp32; else the sums would by some of bf16."""
    sums = []
    for span in (64, T):
        monkeypatch.setattr(plan, "_SHORTEST", span)
        sums.append(summed(case))
    cut, whole = sums
    assert (cut - whole).norm() <= torch.finfo(BF16).eps / 8 * whole.norm()


@pytest.mark.gpu
@gpu
@checks(
    # T is what the quadratic reference can hold in fp64 with a decay per channel.
    *(call(H=2, T=600, K=width, V=width, norm=norm, start=True, decay=lambda noise: F.logsigmoid(noise) / 16)
      for width in (64, 128, 256) for norm in (None, "sum")),
    call(H=2, H_kv=2, K=64, V=64, norm="sum", start=True, decay=mixed, cu=(0, 700, 701, 1500)),
)  # fmt: skip
def test_large(case: Case) -> None:
    case.check()
