"""Kernels of a decay per channel against the fp64 reference, values and gradients, within the precision budget."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.channel_decay_case import BF16, DECAYS, FP16, FP32, Case, as_trained, at_the_limit, mixed, once
from kernels.device import DEVICE
from linattn import linear_attention_with_state
from linattn.kernels.channel_decay.library import channel_decay
from linattn.testing.poison import poisoned_allocations

# Factors of chunks that are not mild overflow before they are put aside; numpy, which runs the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


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
        Case(FP32, T=84, H=1, H_kv=1, decay=as_trained, state=True),
        Case(BF16, T=90, H=1, H_kv=1, normalizer="sum", cu_seqlens=[0, 3, 3, 84, 90], state=True, initial=True),
    ],
    ids=["one sequence", "grouped", "final state", "packed"],
)
def test_segments_side_by_side(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads: the sequence is cut, and states are handed from segment to segment."""
    from linattn.kernels.channel_decay.device import plan

    monkeypatch.setattr(plan, "_SHORTEST", 64)
    case.check()


@pytest.mark.parametrize(
    "options",
    [
        {"decay": as_trained, "normalizer": "sum", "decay_index": "key", "state": True, "initial": True},
        {"decay": as_trained, "H": 2, "cu_seqlens": [0, 3, 3, 90, 150], "state": True, "initial": True},
        {"decay": at_the_limit, "masked": True, "decay_index": "key", "state": True},
        {"decay": mixed, "normalizer": "sum", "T": 130, "initial": True},
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
    Case(T=T, H=1, H_kv=1, K=128, V=128, decay=as_trained).check()


def test_segments_of_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.kernels.channel_decay.device import plan

    monkeypatch.setattr(plan, "_SHORTEST", 64)
    Case(T=200, H=1, H_kv=1, K=64, V=64, decay=at_the_limit, decay_index="key", masked=True, state=True).check()


def test_decays_come_as_they_are() -> None:
    """Not bounded, and not hidden where a token is masked: forward and backward see -inf, and NaN there."""
    T = 70
    case = Case(T=T, masked=True, decay=DECAYS["minus infinity"], decay_index="key", state=True)
    found = case.evaluate(case.kernels, BF16)
    assert all(x.isfinite().all() for x in found.values())
    hidden = ~case.key_mask.cpu()[:, None, :, None].expand_as(found["d log_decay"])
    assert (found["d log_decay"][hidden] == 0).all()
    # decay_index "key": the last token's decay reaches nothing but the state
    shown = Case(T=T, decay=as_trained, decay_index="key")
    assert (shown.evaluate(shown.kernels, BF16)["d log_decay"][:, :, -1] == 0).all()


def test_masked_tokens_get_no_gradient() -> None:
    """Whatever they hold: nothing is put in its place on the way."""
    case = Case(BF16, T=70, masked=True, normalizer="sum", state=True)
    hidden = ~case.key_mask[:, None, :, None]
    leaves = [case.tensors[name].to(DEVICE) for name in ("q", "k", "v", "log_decay")]
    leaves = [x.masked_fill(hidden & (n > 0), torch.nan).requires_grad_() for n, x in enumerate(leaves)]
    output, state = case.kernels(*leaves, None)
    loss = output.masked_fill(hidden, 0).float().sum() + state.kv.sum() + state.k.sum()
    for gradient in torch.autograd.grad(loss, leaves[1:]):
        assert gradient.isfinite().all()
        assert (gradient.masked_select(hidden) == 0).all()


# Where digits beside a closed gate count fp32 judges more strictly, where products leave the range bf16 is as good.
IN_FP32, IN_BF16 = ("mixed", "once", "minus infinity"), ("mixed", "all forget", "minus fifty", "no decay")
EXTREMES = [(name, FP32) for name in IN_FP32] + [(name, BF16) for name in IN_BF16]


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


@pytest.mark.parametrize(
    ("name", "dtype"), EXTREMES if DEVICE == "cpu" else [(name, dtype) for name in DECAYS for dtype in (FP32, BF16)]
)
def test_extreme_decays(name: str, dtype: torch.dtype) -> None:
    Case(dtype, T=50, H=1, H_kv=1, decay=DECAYS[name]).check()


def test_extreme_decays_with_everything() -> None:
    Case(
        BF16, T=50, H=2, H_kv=1, decay=mixed, normalizer="sum", decay_index="key", masked=True, state=True,
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
    Case(FP16, T=40, H=1, H_kv=1, normalizer="sum", decay=once, scale=100.0).check()


def test_fresh_memory_is_never_read_and_runs_are_equal() -> None:
    case = Case(BF16, T=40, H=2, H_kv=1, normalizer="sum", state=True, masked=True, decay=mixed)
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
        BF16, B=1, H=2, H_kv=2, T=1500, K=64, V=64, normalizer="sum", state=True, initial=True, decay=mixed,
        cu_seqlens=[0, 700, 701, 1500],
    ).check()  # fmt: skip
