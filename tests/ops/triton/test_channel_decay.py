"""Kernels of a decay per channel against the fp64 reference, values and gradients, within the precision budget.

The budget: ``err <= 2 (err(reference form in that dtype) + eps max(abs(exact)))``, errors against fp64 (see
linattn/testing/precision.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import linear_attention_with_state
from linattn.ops.triton.channel_decay.attend import attend_channel_decay
from linattn.ops.triton.channel_decay.library import channel_decay
from linattn.ops.types import LinearState
from linattn.testing.poison import poisoned_allocations
from ops.triton.device import DEVICE

# Factors of chunks that are not mild overflow before they are put aside; numpy, which runs the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Decay = Callable[[Tensor], Tensor]


@dataclass
class Case:
    """One call; ``decay`` turns normal noise (B, H_kv, T, K) into log decays."""

    dtype: torch.dtype = BF16
    B: int = 1
    H: int = 2
    H_kv: int = 2
    T: int = 70
    K: int = 16
    V: int = 16
    normalizer: str | None = None
    decay_index: str = "query"
    decay: Decay = F.logsigmoid
    state: bool = False  # gives the final one, with its gradient
    initial: bool = False
    masked: bool = False
    cu_seqlens: list[int] | None = None
    scale: float = 1.0
    tensors: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        B, H, H_kv, T, K, V = self.B, self.H, self.H_kv, self.T, self.K, self.V
        q, k, v = noise(B, H, T, K), noise(B, H_kv, T, K), noise(B, H_kv, T, V)
        if self.normalizer is not None:
            q, k = q.abs(), k.abs() + 0.3
        if self.normalizer == "abs_max_one":
            # Far from 1 on both sides: the gradient jumps there, and rounding would decide to which side.
            q = q * torch.where(noise(B, H, T, 1) > 0.5, 1e-3, 1.0)
        rows = B if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        kv, z = noise(rows, H_kv, K, V), noise(rows, H_kv, K).abs() + 0.3
        if self.normalizer is not None:
            kv = kv * z.unsqueeze(-1)  # as sums of values weighted by keys are
        self.tensors = {
            "q": (q * self.scale).to(self.dtype),
            "k": (k * self.scale).to(self.dtype),
            "v": v.to(self.dtype),
            "log_decay": self.decay(noise(B, H_kv, T, K)),
            "kv": kv if self.initial else None,
            "z": z if self.initial else None,
        }
        self.key_mask = (noise(B, T) > -0.6).to(DEVICE) if self.masked else None
        self.cu = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, device=DEVICE)
        self.cotangents = [noise(B, H, T, V), noise(rows, H_kv, K, V), noise(rows, H_kv, K)]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, initial: LinearState | None):
        return linear_attention_with_state(
            q, k, v, causal=True, log_decay=a, normalizer=self.normalizer, key_mask=self.key_mask,
            cu_seqlens=self.cu, decay_index=self.decay_index, initial_state=initial, impl="reference",
        )  # fmt: skip

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, initial: LinearState | None):
        if self.key_mask is not None:
            a = a.masked_fill(~self.key_mask[:, None, :, None], torch.nan)
        return attend_channel_decay(
            q, k, v, log_decay=a, decay_index=self.decay_index, normalizer=self.normalizer, eps=1e-6,
            key_mask=self.key_mask, cu_seqlens=self.cu, initial=initial, out_dtype=v.dtype, need_state=self.state,
        )  # fmt: skip

    def evaluate(self, form: Callable, dtype: torch.dtype, view: Callable[[Tensor], Tensor] | None = None):
        """Output, states and all gradients, in fp64 on the CPU."""
        wide = torch.float64 if dtype == torch.float64 else FP32
        leaves = {
            name: x.to(DEVICE, dtype if name in ("q", "k", "v") else wide, copy=True).requires_grad_()
            for name, x in self.tensors.items()
            if x is not None
        }
        view = view or (lambda x: x)
        q, k, v = (view(leaves[name]) for name in "qkv")
        if self.key_mask is not None:  # what a masked token holds does not matter
            hidden = ~self.key_mask[:, None, :, None]
            k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        initial = LinearState(leaves["kv"], leaves["z"]) if self.initial else None
        output, state = form(q, k, v, leaves["log_decay"], initial)
        if self.key_mask is not None:
            output = output * self.key_mask[:, None, :, None]
        found = {"output": output}
        if self.state:
            found |= {"state kv": state.kv, "state k": state.k}
        gradients = torch.autograd.grad(
            list(found.values()),
            list(leaves.values()),
            [c.to(x) for x, c in zip(found.values(), self.cotangents, strict=False)],
        )
        found |= {f"d {name}": g for name, g in zip(leaves, gradients, strict=True)}
        return {name: x.detach().double().cpu() for name, x in found.items()}

    def errors(self, view: Callable[[Tensor], Tensor] | None = None) -> dict[str, tuple[float, float]]:
        """Of each result the error and what is allowed."""
        exact = self.evaluate(self.reference, torch.float64)
        plain = self.evaluate(self.reference, self.dtype)
        found = self.evaluate(self.kernels, self.dtype, view)
        sizes = {}
        for name, x in exact.items():
            cost, size = (plain[name] - x).abs().max().item(), x.abs().max().item()
            # The reference too adds what cancels, numbers near 1, before it comes to a decay's tiny gradient.
            budget = 2 * (cost + torch.finfo(self.dtype).eps * max(size, 1e-6))
            if self.dtype == FP32 and name == "d log_decay":
                budget *= 2  # the reference adds up pairs, in fp64; kernels sum q dq - k dk along the sequence in fp32
            sizes[name] = (found[name] - x).abs().max().item(), budget
        return sizes

    def check(self, view: Callable[[Tensor], Tensor] | None = None) -> None:
        for name, (error, budget) in self.errors(view).items():
            assert error <= budget, f"{name}: error {error:.3g}, allowed {budget:.3g}"


def _mixed(noise: Tensor) -> Tensor:
    """Closed gates and open ones, side by side in one chunk."""
    return torch.where(noise > 1.5, -800.0, torch.where(noise > 1, -50.0, torch.where(noise < 0, 0.0, -0.1 * noise)))


def _open(noise: Tensor) -> Tensor:
    """As trained gates are: every chunk is mild."""
    return F.logsigmoid(noise + 3)


def _at_the_limit(noise: Tensor) -> Tensor:
    """A half of 64 tokens decays by about 2^-80: chunks of both kinds side by side, and channels of both in one."""
    return -1.7 * noise.abs()


def _once(noise: Tensor) -> Tensor:
    """One token forgets everything; around it digits of small decays count."""
    at = torch.arange(noise.shape[2]) == 40
    return torch.where(at[:, None], -800.0, -0.05 * noise.abs())


DECAYS: dict[str, Decay] = {
    "mixed": _mixed,
    "once": _once,
    "all forget": lambda noise: torch.full_like(noise, -800.0),
    "minus fifty": lambda noise: torch.full_like(noise, -50.0),
    "no decay": torch.zeros_like,
    "minus infinity": lambda noise: torch.where(noise > 1, -torch.inf, -0.1 * noise.abs()),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_plain(dtype: torch.dtype) -> None:
    Case(dtype).check()


@pytest.mark.parametrize(
    "case",
    [
        Case(FP32, normalizer="sum", decay_index="key"),
        Case(FP32, normalizer="abs_max_one", T=40),
        Case(BF16, normalizer="sum"),
        Case(BF16, normalizer="abs_max_one", decay_index="key"),
        Case(FP16, normalizer="sum", decay_index="key", T=40),
    ],
    ids=lambda case: f"{case.dtype}-{case.normalizer}-{case.decay_index}",
)
def test_normalizers(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    "case",
    [
        Case(FP32, state=True, T=40),
        Case(BF16, state=True, initial=True, decay_index="key"),
        Case(BF16, initial=True, normalizer="sum", T=40),
        Case(FP32, state=True, initial=True, normalizer="sum", decay_index="key", T=40),
    ],
    ids=["final", "both", "initial", "normalised"],
)
def test_states(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("dtype", [FP32] if DEVICE == "cpu" else [FP32, BF16], ids=str)
def test_masked_tokens_and_grouped_heads(dtype: torch.dtype) -> None:
    Case(dtype, B=2, H=2, H_kv=1, T=40, normalizer="sum", masked=True, state=True, initial=True).check()


@pytest.mark.parametrize("decay_index", ["query", "key"])
def test_packed_sequences(decay_index: str) -> None:
    Case(
        BF16, H=2, H_kv=1, normalizer="sum", decay_index=decay_index, cu_seqlens=[0, 3, 3, 40, 70],
        state=True, initial=True,
    ).check()  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Case(FP32, T=84, H=1, H_kv=1, normalizer="sum", state=True, initial=True),
        Case(BF16, T=84, H=2, H_kv=1, decay_index="key"),
        Case(BF16, T=90, H=1, H_kv=1, normalizer="sum", cu_seqlens=[0, 3, 3, 84, 90], state=True, initial=True),
    ],
    ids=["one sequence", "grouped", "packed"],
)
def test_segments_side_by_side(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads: the sequence is cut, and states are handed from segment to segment."""
    from linattn.ops.triton.channel_decay.kernels import plan

    monkeypatch.setattr(plan, "_SHORTEST", 64)
    case.check()


@pytest.mark.parametrize(
    "options",
    [
        {"decay": _open, "normalizer": "sum", "decay_index": "key", "state": True, "initial": True},
        {"decay": _open, "H": 2, "cu_seqlens": [0, 3, 3, 90, 150], "state": True, "initial": True},
        {"decay": _at_the_limit, "masked": True, "decay_index": "key", "state": True},
        {"decay": _mixed, "normalizer": "sum", "T": 130, "initial": True},
    ],
    ids=["open", "packed", "limit", "mixed"],
)
@pytest.mark.parametrize(("K", "V"), [(64, 64)] if DEVICE == "cpu" else [(64, 64), (128, 64), (64, 128), (128, 128)])
def test_wide_heads_of_several_chunks(options: dict, K: int, V: int) -> None:
    """From 64 features on chunks are longer, and each pass has programs of its own for parts of a head."""
    Case(**{"T": 150, "H": 1, "H_kv": 1, "K": K, "V": V} | options).check()


@pytest.mark.parametrize("T", [64, 129])
def test_widths_that_halve_differently(T: int) -> None:
    """Outputs halve the values, gradients of queries and keys the features."""
    Case(T=T, H=1, H_kv=1, K=128, V=128, decay=_open).check()


def test_segments_of_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.ops.triton.channel_decay.kernels import plan

    monkeypatch.setattr(plan, "_SHORTEST", 64)
    Case(T=200, H=1, H_kv=1, K=64, V=64, decay=_at_the_limit, decay_index="key", masked=True, state=True).check()


def test_decays_come_as_they_are() -> None:
    """No copy of them is made to bound them or to hide masked tokens, forward or backward."""
    T = 70
    case = Case(T=T, masked=True, decay=DECAYS["minus infinity"], decay_index="key", state=True)
    found = case.evaluate(case.kernels, BF16)
    assert all(x.isfinite().all() for x in found.values())
    hidden = ~case.key_mask.cpu()[:, None, :, None].expand_as(found["d log_decay"])
    assert (found["d log_decay"][hidden] == 0).all()
    # decay_index "key": the last token's decay reaches nothing but the state
    shown = Case(T=T, decay=_open, decay_index="key")
    assert (shown.evaluate(shown.kernels, BF16)["d log_decay"][:, :, -1] == 0).all()


# Where digits beside a closed gate count fp32 judges more strictly, where products leave the range bf16 is as good.
IN_FP32, IN_BF16 = ("mixed", "once", "minus infinity"), ("mixed", "all forget", "minus fifty", "no decay")
EXTREMES = [(name, FP32) for name in IN_FP32] + [(name, BF16) for name in IN_BF16]


@pytest.mark.parametrize(
    ("name", "dtype"), EXTREMES if DEVICE == "cpu" else [(name, dtype) for name in DECAYS for dtype in (FP32, BF16)]
)
def test_extreme_decays(name: str, dtype: torch.dtype) -> None:
    Case(dtype, T=50, H=1, H_kv=1, decay=DECAYS[name]).check()


def test_extreme_decays_with_everything() -> None:
    Case(
        BF16, T=50, H=2, H_kv=1, decay=_mixed, normalizer="sum", decay_index="key", masked=True, state=True,
        initial=True,
    ).check()  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "K", "V"), [(FP32, 5, 7), (BF16, 1, 3), (FP32, 70, 20), (BF16, 64, 128), (BF16, 130, 140)]
)
def test_widths(dtype: torch.dtype, K: int, V: int) -> None:
    """Odd ones are padded; beyond 128 (fp32: 64) several parts are added up."""
    normalizer = "sum" if K > 1 else None  # one normalised feature gives the same output whatever it is
    Case(dtype, T=20, H=1, H_kv=1, K=K, V=V, normalizer=normalizer, state=True, initial=True).check()


@pytest.mark.parametrize("T", [0, 1, 32, 33])
def test_lengths(T: int) -> None:
    case = Case(BF16, T=T, H=1, H_kv=1, normalizer="sum", state=True, initial=True, decay_index="key")
    if T:
        case.check()
        return
    found = case.evaluate(case.kernels, BF16)
    assert found["output"].shape == (1, 1, 0, 16)
    assert torch.equal(found["state kv"], case.tensors["kv"].double())
    assert torch.equal(found["d kv"], case.cotangents[1].double())


@pytest.mark.parametrize("layout", ["(B, T, H, D)", "(B, H, D, T)"])
def test_strided_inputs(layout: str) -> None:
    """Views are read where they lie; the last dimension need not be the dense one."""

    def view(x: Tensor) -> Tensor:
        if layout == "(B, T, H, D)":
            return torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]
        return x.mT.contiguous().mT

    Case(BF16, T=40, B=2, H=1, H_kv=1).check(view)


def test_fp16_sums_beyond_its_range() -> None:
    """Row sums and states here reach 1e6; only their quotient is fp16."""
    case = Case(FP16, T=40, H=1, H_kv=1, normalizer="sum", decay=lambda noise: -0.001 * noise.abs(), scale=100.0)
    case.check()
    Case(FP16, T=40, H=1, H_kv=1, normalizer="sum", decay=_once, scale=100.0).check()


def test_fresh_memory_is_never_read_and_runs_are_equal() -> None:
    case = Case(BF16, T=40, H=2, H_kv=1, normalizer="sum", state=True, masked=True, decay=_mixed)
    with poisoned_allocations():
        poisoned = case.evaluate(case.kernels, BF16)
    again = case.evaluate(case.kernels, BF16)
    for name, x in poisoned.items():
        assert torch.equal(x, again[name]), name


def test_operators_keep_the_contract_of_the_library() -> None:
    tensors = Case(FP32, T=5, H=2, H_kv=1, K=4, V=4).tensors
    q, k, v, a = (tensors[name].to(DEVICE).requires_grad_() for name in ("q", "k", "v", "log_decay"))
    start = [torch.zeros(shape, device=DEVICE, requires_grad=True) for shape in ((1, 1, 4, 4), (1, 1, 4))]
    torch.library.opcheck(channel_decay, (q, k, v, a, *start, None, None, 1, 1e-6, True, True, FP32))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("normalizer", [None, "sum"])
def test_large(width: int, normalizer: str | None) -> None:
    """T is what the quadratic reference can hold in fp64 with a decay per channel."""
    Case(
        BF16, B=1, H=2, H_kv=1, T=600, K=width, V=width, normalizer=normalizer, state=True, initial=True,
        decay=lambda noise: F.logsigmoid(noise) / 16,
    ).check()  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
def test_large_packed_and_strong() -> None:
    Case(
        BF16, B=1, H=2, H_kv=2, T=1500, K=64, V=64, normalizer="sum", state=True, initial=True, decay=_mixed,
        cu_seqlens=[0, 700, 701, 1500],
    ).check()  # fmt: skip
