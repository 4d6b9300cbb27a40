"""Causal attention and both ways on Triton kernels, against the reference in fp64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import linear_attention, linear_attention_with_state
from linattn.ops.prepare import log_decay_for
from linattn.ops.triton import causal_config, causal_passes
from linattn.ops.triton.causal import attend_both_ways, attend_causal
from linattn.ops.triton.causal_library import triton_causal, triton_causal_backward
from linattn.ops.types import LinearState
from linattn.testing.poison import poisoned_allocations
from ops.triton.device import DEVICE

Found = dict[str, Tensor]


@dataclass
class Case:
    B: int = 1
    H: int = 2
    H_kv: int = 1
    T: int = 100
    K: int = 16
    V: int = 16
    decay: str | None = None
    index: str = "query"
    norm: str | None = "sum"
    dtype: torch.dtype = torch.float32
    state: bool = False
    mask: bool = False
    cu: tuple[int, ...] | None = None
    both: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.T + 7 * self.K)
        if self.cu is not None:
            self.B, self.T = 1, self.cu[-1]
        B, H, H_kv, T, K, V = self.B, self.H, self.H_kv, self.T, self.K, self.V
        n = B if self.cu is None else len(self.cu) - 1

        def draw(*shape: int, positive: bool = False) -> Tensor:
            x = torch.rand(shape, generator=gen) if positive else torch.randn(shape, generator=gen)
            return x.to(DEVICE)

        positive = self.norm is not None
        self.q = (draw(B, H, T, K, positive=positive) * self.scale).to(self.dtype)
        self.k = (draw(B, H_kv, T, K, positive=positive) * self.scale).to(self.dtype)
        if self.norm == "abs_max_one":
            # Row sums on both sides of 1 and of -1, none of them the rest of a cancellation.
            self.q = self.q * 0.1
            self.q[:, 0] *= -1
        # A decay per head gets the sum over all tokens: positive numbers keep it from cancelling. With a normaliser
        # they would do the opposite: it takes their mean away.
        self.v = (draw(B, H_kv, T, V, positive=self.decay == "head" and self.norm is None) * self.scale).to(self.dtype)
        self.d_out = draw(B, H, T, V, positive=self.decay == "head" and self.norm is None).to(self.dtype)
        self.initial = LinearState(draw(n, H_kv, K, V), draw(n, H_kv, K, positive=True)) if self.state else None
        self.d_state = draw(n, H_kv, K, V), draw(n, H_kv, K)
        self.a = {
            None: None,
            "head": -0.2 * draw(H_kv, positive=True),
            "token": F.logsigmoid(draw(B, H_kv, T) + 4),
            "strong": -20 * draw(B, H_kv, T, positive=True),
            # 64 tokens lose about exp(-55): the most that is still taken in two factors.
            "steep": torch.full((B, H_kv, T), -0.86, device=DEVICE),
            "closed": torch.where(draw(B, H_kv, T) > 1, -torch.inf, -0.1),
        }[self.decay]
        self.key_mask = draw(B, T, positive=True) > 0.3 if self.mask else None
        if self.key_mask is not None:
            self.k, self.v = (x.masked_fill(~self.key_mask[:, None, :, None], torch.nan) for x in (self.k, self.v))
        self.cu_seqlens = None if self.cu is None else torch.tensor(self.cu, device=DEVICE)

    def reference(self, dtype: torch.dtype) -> Found:
        def call(q, k, v, a, initial):
            options = {
                "causal": not self.both, "log_decay": a, "normalizer": self.norm, "key_mask": self.key_mask,
                "cu_seqlens": self.cu_seqlens, "decay_index": self.index, "impl": "reference",
            }  # fmt: skip
            if self.state:
                return linear_attention_with_state(q, k, v, initial_state=initial, **options)
            return linear_attention(q, k, v, **options), None

        return self._run(call, dtype)

    def kernels(self) -> Found:
        def call(q, k, v, a, initial):
            options = {
                "log_decay": log_decay_for(a, self.key_mask), "decay_index": self.index, "normalizer": self.norm,
                "eps": 1e-6, "key_mask": self.key_mask, "cu_seqlens": self.cu_seqlens, "out_dtype": v.dtype,
            }  # fmt: skip
            if self.both:
                return attend_both_ways(q, k, v, **options), None
            return attend_causal(q, k, v, initial=initial, need_state=self.state, **options)

        return self._run(call, self.dtype)

    def _run(self, call, dtype: torch.dtype) -> Found:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = {name: getattr(self, name).detach().to(dtype).requires_grad_() for name in "qkv"}
        if self.a is not None:
            leaves["a"] = self.a.to(wide).requires_grad_()
        initial = None
        if self.initial is not None:
            leaves["kv"], leaves["z"] = (x.to(wide).requires_grad_() for x in self.initial)
            initial = LinearState(leaves["kv"], leaves["z"])
        output, state = call(*(leaves[name] for name in "qkv"), leaves.get("a"), initial)
        found = {"output": output}
        loss = (output.double() * self.d_out.double()).sum()
        if state is not None:
            found["state.kv"], found["state.k"] = state
            loss = loss + sum((x.double() * d.double()).sum() for x, d in zip(state, self.d_state, strict=True))
        grads = torch.autograd.grad(loss, list(leaves.values()))
        found.update({f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})
        if self.key_mask is not None:
            for name in ("output", "dq"):  # what a masked token gives carries no meaning
                found[name] = found[name].masked_fill(~self.key_mask[:, None, :, None], 0)
        return {name: x.detach() for name, x in found.items()}


def errors(case: Case) -> tuple[Found, dict[str, tuple[float, float]]]:
    """What the kernels found, and of each result the error and what is allowed."""
    exact, plain, found = case.reference(torch.float64), case.reference(case.dtype), case.kernels()
    eps = torch.finfo(case.dtype).eps
    if DEVICE == "cpu" and case.dtype == torch.bfloat16:
        eps *= 2  # Triton's interpreter cuts digits off where a GPU rounds
    sizes = {}
    for name, want in exact.items():
        assert found[name].shape == want.shape
        assert found[name].dtype == plain[name].dtype
        if want.numel() == 0:
            continue
        error, cost = ((x[name].double() - want).abs().max().item() for x in (found, plain))
        # A gradient through the normaliser is a rest of larger numbers too: do . v less its mean.
        factor = 4 if name in ("dq", "dk") and case.norm is not None else 2
        budget = factor * (cost + eps * (want.abs().max().item() + (_cancelled(case, exact) if name == "da" else 0)))
        sizes[name] = error, budget
    return found, sizes


def check(case: Case) -> Found:
    found, sizes = errors(case)
    for name, (error, budget) in sizes.items():
        assert error <= budget, f"{name}: error {error:.3g}, allowed {budget:.3g}"
    return found


def _cancelled(case: Case, exact: Found) -> float:
    """The decay's gradient is a rest of q . dq and k . dk, and rounding goes by what was there before."""
    assert case.a is not None
    k = case.k.nan_to_num().double()
    parts = ((case.q.double() * exact["dq"]).sum(-1), (k * exact["dk"]).sum(-1))
    largest = sum(x.abs().max().item() for x in parts)
    return largest * (case.B * case.T if case.a.ndim == 1 else 1)


@contextmanager
def segments(count: int) -> Iterator[None]:
    causal_config.TRIAL_SEGMENTS.append(count)
    try:
        yield
    finally:
        causal_config.TRIAL_SEGMENTS.clear()


@pytest.mark.parametrize("norm", [None, "sum", "abs_max_one"])
@pytest.mark.parametrize(("decay", "index"), [(None, "query"), ("token", "query"), ("token", "key"), ("head", "key")])
def test_values_and_gradients(decay: str | None, index: str, norm: str | None) -> None:
    check(Case(decay=decay, index=index, norm=norm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "norm"), [(None, None), (None, "sum"), ("token", "sum"), ("strong", "abs_max_one")])
def test_low_precision(dtype: torch.dtype, decay: str | None, norm: str | None) -> None:
    check(Case(dtype=dtype, decay=decay, norm=norm, T=150))


@pytest.mark.parametrize("index", ["query", "key"])
@pytest.mark.parametrize("both", [False, True])
def test_the_steepest_decay_in_factors(both: bool, index: str) -> None:
    """Factors up to exp(55) inside a chunk, grouped heads; one closed gate sends its whole row to the exact form."""
    case = Case(decay="steep", dtype=torch.bfloat16, both=both, index=index, T=150, H=4, H_kv=2)
    check(case)
    case.a = case.a.detach().clone()
    case.a[:, 0, 70] = -torch.inf
    found = check(case)
    assert all(x.isfinite().all() for x in found.values())


def test_sums_beyond_fp16_stay_finite() -> None:
    """Scores and state reach 1e7 here, the output does not."""
    check(Case(dtype=torch.float16, scale=100, T=150))
    check(Case(dtype=torch.float16, scale=100, decay="token", both=True))


@pytest.mark.parametrize("decay", ["strong", "closed"])
@pytest.mark.parametrize("both", [False, True])
def test_gates_that_close(decay: str, both: bool) -> None:
    check(Case(decay=decay, norm="abs_max_one", both=both))


@pytest.mark.parametrize(
    ("K", "V", "dtype"),
    [
        (1, 1, torch.float32),
        (24, 40, torch.float32),
        (3, 17, torch.bfloat16),
        (128, 64, torch.bfloat16),
        (64, 128, torch.bfloat16),
        (256, 48, torch.bfloat16),
        (48, 256, torch.bfloat16),
    ],
)
def test_widths(K: int, V: int, dtype: torch.dtype) -> None:
    check(Case(K=K, V=V, T=70, dtype=dtype, decay="token"))


@pytest.mark.parametrize("T", [0, 1, 31, 32, 33, 129])
def test_lengths(T: int) -> None:
    check(Case(T=T, decay="token", state=True))


@pytest.mark.parametrize(("H", "H_kv"), [(1, 1), (6, 2)])
def test_grouped_heads(H: int, H_kv: int) -> None:
    check(Case(B=2, H=H, H_kv=H_kv, T=40, decay="token", state=True, norm="abs_max_one"))


@pytest.mark.parametrize("norm", [None, "sum"])
@pytest.mark.parametrize("decay", [None, "token"])
def test_states(norm: str | None, decay: str | None) -> None:
    check(Case(norm=norm, decay=decay, state=True))


def test_hand_over() -> None:
    case = Case(decay="token", H_kv=2)
    options = {"decay_index": "query", "normalizer": "sum", "eps": 1e-6, "out_dtype": torch.float32}
    whole = attend_causal(case.q, case.k, case.v, log_decay=case.a, **options)
    assert whole.state is None
    state, parts = None, []
    for part in (slice(0, 37), slice(37, 70), slice(70, 100)):
        q, k, v = (x[:, :, part] for x in (case.q, case.k, case.v))
        out = attend_causal(q, k, v, log_decay=case.a[:, :, part], initial=state, need_state=True, **options)
        state = out.state
        parts.append(out.output)
    torch.testing.assert_close(torch.cat(parts, 2), whole.output)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("decay", ["token", "head"])
def test_padding(both: bool, decay: str) -> None:
    found = check(Case(B=2, mask=True, decay=decay, both=both, state=not both))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("both", [False, True])
def test_packed_sequences(both: bool) -> None:
    check(Case(cu=(0, 5, 5, 70, 130), decay="token", both=both, state=not both))


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (3, {"norm": "sum", "decay": None}),
        (2, {"norm": None, "decay": "token", "state": True}),
        (3, {"norm": "sum", "decay": "token", "state": True, "mask": True, "index": "key"}),
        (2, {"norm": "sum", "decay": "token", "state": True, "cu": (0, 5, 5, 70, 200)}),
        (3, {"norm": "sum", "decay": "token", "both": True}),
        (2, {"norm": None, "decay": "token", "both": True, "cu": (0, 5, 5, 70, 200)}),
    ],
)
def test_segments(count: int, options: dict) -> None:
    with segments(count):
        check(Case(T=200, **options))


@pytest.mark.parametrize("decay", [None, "token"])
def test_gradients_over_parts_of_wide_values(decay: str | None) -> None:
    """More values than one sweep takes: states, key sums and marks of each part are where they belong."""
    with segments(2), poisoned_allocations():
        check(Case(T=130, V=160, H=2, H_kv=1, dtype=torch.bfloat16, decay=decay, state=True))


@pytest.mark.parametrize("index", ["query", "key"])
@pytest.mark.parametrize(("decay", "norm"), [("token", "sum"), ("head", None), ("token", "abs_max_one")])
def test_both_ways(index: str, decay: str, norm: str | None) -> None:
    check(Case(both=True, decay=decay, index=index, norm=norm))


def test_both_ways_in_low_precision() -> None:
    check(Case(both=True, decay="token", index="key", dtype=torch.bfloat16))
    check(Case(both=True, decay="token", index="key", dtype=torch.float16, norm=None))


@pytest.mark.parametrize("both", [False, True])
def test_nothing_is_read_that_nobody_wrote(both: bool) -> None:
    case = Case(decay="token", both=both, state=not both, T=70, K=24, V=20)
    with poisoned_allocations():
        found = case.kernels()
    again = case.kernels()
    for name, x in found.items():
        assert x.isfinite().all(), name
        assert torch.equal(x, again[name]), name


def test_repeated_runs_are_equal() -> None:
    case = Case(decay="head", dtype=torch.bfloat16, T=200)
    with segments(2):
        first, second = case.kernels(), case.kernels()
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_strided_inputs() -> None:
    case = Case(H_kv=2, decay="token")
    want = case.kernels()
    packed = torch.stack([x.transpose(1, 2) for x in (case.q, case.k, case.v)], dim=2)  # (B, T, 3, H, D)
    case.q, case.k, case.v = packed.permute(2, 0, 3, 1, 4).unbind()
    assert not case.q.is_contiguous()
    case.a = case.a.transpose(1, 2).contiguous().transpose(1, 2)
    for name, x in case.kernels().items():
        assert torch.equal(x, want[name]), name
    case.q, case.k, case.v = (x.mT.contiguous().mT for x in (case.q, case.k, case.v))
    assert case.q.stride(3) != 1
    for name, x in case.kernels().items():
        assert torch.equal(x, want[name]), name


def test_operators_are_registered_well() -> None:
    case = Case(T=20, decay="token", state=True)
    q, k, v, a = (x.requires_grad_() for x in (case.q, case.k, case.v, case.a))
    args = (q, k, v, *case.initial, a, None, None, True, 1, 1e-6, torch.float32, True, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_causal, args, test_utils=tests)
    out, den, *_ = triton_causal(*args)
    args = (out, *case.d_state, q, k, v, *case.initial, a, None, None, out, den, True, 1, 1e-6, False, True)
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    torch.library.opcheck(triton_causal_backward, args, test_utils=("test_schema", "test_faketensor"))


def test_a_width_that_no_kernel_has() -> None:
    q = torch.zeros(1, 1, 4, 257, device=DEVICE)
    with pytest.raises(ValueError, match="1 to 256 features"):
        attend_causal(
            q, q, q, log_decay=None, decay_index="query", normalizer=None, eps=0.0, out_dtype=torch.float32
        )  # fmt: skip


CONFIGS = [(width, config) for width, configs in causal_config.CANDIDATES.items() for config in configs]


@contextmanager
def trial(config: dict[str, int]) -> Iterator[None]:
    causal_config.TRIAL.update(dict.fromkeys(("output", "dq", "dk", "dv", "states"), config))
    try:
        yield
    finally:
        causal_config.TRIAL.clear()


@pytest.mark.parametrize(("width", "columns"), sorted({(width, config["BW"]) for width, config in CONFIGS}))
def test_every_tile(width: int, columns: int) -> None:
    """All that tells configs apart in the interpreter: it knows neither warps nor stages."""
    with trial({"BW": columns}), segments(2), poisoned_allocations():
        check(Case(K=width, V=width, T=66, H=1, dtype=torch.bfloat16, norm="sum"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize(("width", "config"), CONFIGS)
@pytest.mark.parametrize("decay", [None, "token"])
def test_every_config(width: int, config: dict[str, int], decay: str | None) -> None:
    """Values and gradients within the budget, and twice the same bits."""
    case = Case(K=width, V=width, T=900, B=2, H=4, H_kv=4, dtype=torch.bfloat16, decay=decay)
    with trial(config), segments(2), poisoned_allocations():
        found = check(case)
        again = case.kernels()
    for name, x in found.items():
        assert torch.equal(x, again[name]), name


def test_odd_widths_in_16_bits_meet_no_masked_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros up to a multiple of 16, and rows that start at whole vectors, before a kernel sees them."""
    seen = []
    monkeypatch.setattr(causal_passes, "_launch", lambda kernel, programs, *args, **options: seen.append(args))
    q = torch.zeros(1, 2, 20, 3 * 33, dtype=torch.bfloat16, device=DEVICE)[..., 1:34].requires_grad_()
    v = q[..., :17]
    out = attend_causal(
        q, q, v, log_decay=None, decay_index="query", normalizer="sum", eps=0.0, out_dtype=q.dtype
    ).output  # fmt: skip
    assert out.shape == (1, 2, 20, 17)
    out.sum().backward()
    assert len(seen) == 5  # four sweeps, and the row sums' gradient
    for args in seen:
        for x in args:
            if isinstance(x, Tensor) and x.dtype == torch.bfloat16:
                assert x.shape[-1] % 16 == 0
                assert x.stride(-1) == 1
                assert x.data_ptr() % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("K", "V"), [(16, 16), (32, 32), (64, 64), (128, 128), (64, 128), (128, 256), (96, 80), (256, 256)]
)
@pytest.mark.parametrize("options", [
    {"norm": None}, {"norm": "sum"}, {"norm": None, "decay": "token"}, {"norm": "abs_max_one", "decay": "head"},
    {"norm": "sum", "decay": "token", "both": True},
])  # fmt: skip
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
def test_every_width(K: int, V: int, dtype: torch.dtype, options: dict) -> None:
    check(Case(B=2, H=4, H_kv=2, T=700, K=K, V=V, dtype=dtype, **options))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize("decay", [None, "token"])
def test_long_sequences_in_segments(decay: str | None) -> None:
    """Few heads: the device's own choice of segments, unlike in the small tests."""
    case = Case(B=1, H=2, T=5000, K=64, V=64, dtype=torch.bfloat16, decay=decay, state=True)
    check(case)
