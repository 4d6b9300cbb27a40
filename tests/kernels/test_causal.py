"""Causal attention, and attention both ways under a decay, by kernels: every option and setting against fp64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import BF16, FP16, FP32
from kernels.case import Case, checks, forced
from kernels.device import DEVICE
from linattn import create_mechanism, linear_attention
from linattn.kernels.causal import config as causal_config
from linattn.kernels.causal import passes
from linattn.kernels.causal.library import triton_causal

PACKED = (0, 5, 5, 70, 130)
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")


def call(**options: Any) -> Case:
    return Case(**{"causal": True} | options)


def both(**options: Any) -> Case:
    return Case(**{"decay": "token"} | options)


@pytest.mark.parametrize("norm", [None, "sum", "abs_max_one"])
@pytest.mark.parametrize(("decay", "index"), [(None, "query"), ("token", "query"), ("token", "key"), ("head", "key")])
def test_values_and_gradients(decay: str | None, index: str, norm: str | None) -> None:
    call(decay=decay, index=index, norm=norm).check()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("decay", "norm"), [(None, None), (None, "sum"), ("token", "sum"), ("strong", "abs_max_one")])
def test_low_precision(dtype: torch.dtype, decay: str | None, norm: str | None) -> None:
    call(dtype=dtype, decay=decay, norm=norm).check()


WEIGHED = [
    {"causal": True, "decay": "token", "norm": None, "dtype": BF16, "start": True, "H": 4, "H_kv": 2, "T": 150},
    {"causal": True, "decay": "strong", "dtype": BF16, "start": True, "H": 4, "H_kv": 2, "T": 70},
    {"causal": True, "decay": "token", "norm": "abs_max_one", "index": "key", "mask": True, "B": 2, "T": 70},
    {"causal": True, "T": 70},
    {"causal": True, "decay": "token", "dtype": BF16, "start": True, "cu": PACKED, "segments": 2},
    {"causal": True, "decay": "token", "dtype": BF16, "start": True, "V": 160, "T": 130, "segments": 2},
    {"decay": "steep", "norm": None, "dtype": BF16, "T": 70},
    {"decay": "token", "dtype": FP16, "index": "key", "T": 70},
]


@checks(
    *(Case(weighed=True, **options) for options in WEIGHED),
    *(call(decay="token", T=T, start=True) for T in (2, 31, 32, 33, 129)),
    *(call(T=70, decay="token", K=K, V=V, dtype=dtype) for K, V, dtype in (
        (24, 40, FP32), (3, 17, BF16), (128, 64, BF16), (64, 128, BF16), (256, 48, BF16), (48, 256, BF16),
    )),
    call(T=70, decay="token", K=1, V=1, norm=None),
    # Narrow beside wide under shared heads: their products are made wider, see ``missing_of_both``.
    *(Case(K=K, V=V, H=3, T=70, dtype=BF16, decay="token", causal=causal, start=causal)
      for K, V in ((200, 16), (24, 136)) for causal in (True, False)),
    *(call(B=2, H=H, H_kv=H_kv, T=40, decay="token", start=True, norm="abs_max_one") for H, H_kv in ((1, 1), (6, 2))),
    *(call(norm=norm, decay=decay, start=True) for norm in (None, "sum") for decay in (None, "token")),
    *(Case(decay=decay, norm="abs_max_one", causal=causal) for decay in ("strong", "closed")
      for causal in (True, False)),
    # Factors up to exp(55) inside a chunk.
    call(decay="steep", dtype=BF16, T=150, H=4, H_kv=2),
    both(decay="steep", dtype=BF16, T=150, H=4, H_kv=2, index="key"),
    # Scores and state reach 1e7 here, the output does not.
    call(dtype=FP16, scale=100, T=150),
    both(dtype=FP16, scale=100),
    call(B=2, mask=True, decay="token", start=True),
    both(B=2, mask=True, decay="head"),
    call(cu=PACKED, decay="token", start=True),
    both(cu=PACKED),
    both(index="query", norm="sum"),
    both(index="key", norm=None, decay="head"),
    both(index="query", norm="abs_max_one"),
    both(index="key", dtype=FP16, norm=None),
    *(call(H_kv=2, decay="token", layout=layout) for layout in ("tokens", "columns")),
)  # fmt: skip
def test_every_option(case: Case) -> None:
    case.check()


@checks(
    call(T=200, segments=3),
    call(T=200, norm=None, decay="token", start=True, segments=2),
    call(T=200, decay="token", start=True, mask=True, index="key", segments=3),
    call(decay="token", start=True, cu=(0, 5, 5, 70, 200), segments=2),
    both(T=200, segments=3),
    both(norm=None, cu=(0, 5, 5, 70, 200), segments=2),
    # More values than one sweep takes: states, key sums and marks of each part are where they belong.
    *(call(T=130, V=160, dtype=BF16, decay=decay, start=True, segments=2) for decay in (None, "token")),
)
def test_segments(case: Case) -> None:
    case.check()


@checks(
    both(dtype=BF16, index="key", T=330, V=48, K=32, H=1, segments=3),  # whole and half chunks
    both(dtype=BF16, norm="abs_max_one", T=150, H=4, H_kv=2, segments=2),
    both(dtype=BF16, decay="strong", index="key", T=197),
    both(dtype=BF16, decay="closed", norm=None, T=140, segments=2),
    both(dtype=BF16, decay="head", index="key", T=140, B=2, mask=True, segments=2),
    both(dtype=BF16, cu=(0, 5, 5, 70, 300), index="key", segments=2),
)
def test_both_ways_in_one_walk(case: Case) -> None:
    """The forward pass of 16 bits."""
    case.check()


APART = {"trial": {"output": {"apart": 1}}}


@checks(
    call(start=True, K=48, **APART),
    call(norm="abs_max_one", decay="token", H=4, H_kv=2, T=64, **APART),
    call(decay="token", start=True, mask=True, index="key", T=70, segments=3, **APART),
    call(decay="token", start=True, cu=PACKED, segments=2, **APART),
    both(decay="head", K=40, T=66, H=1, segments=2, **APART),
    both(norm="abs_max_one", mask=True, T=64, **APART),
    both(weighed=True, dtype=BF16, T=70, segments=2, **APART),
    both(norm="abs_max_one", decay="closed", index="key", T=40, **APART),
    *(call(dtype=dtype, decay=decay, T=150, start=True, **APART)
      for dtype in (BF16, FP16) for decay in (None, "steep")),
)  # fmt: skip
def test_row_sums_in_a_kernel_of_their_own(case: Case) -> None:
    case.check()


CONFIGS = [(width, config) for width, configs in causal_config.CANDIDATES.items() for config in configs]
ROLES = ("output", "dq", "dk", "dv", "states")
PARTS = {"trial": {"output": {"parts": 8}}}


@checks(
    # All that tells configs apart in the interpreter: it knows neither warps nor stages.
    *(call(K=width, V=width, T=66, H=1, dtype=BF16, segments=2, trial={role: {"BW": columns} for role in ROLES})
      for width, columns in sorted({(width, config["BW"]) for width, config in CONFIGS})),
    call(T=130, dtype=BF16, mask=True, start=True, K=80, V=16, segments=2, **PARTS),
    call(T=130, dtype=BF16, decay="token", start=True, segments=2, **PARTS),
    call(T=130, dtype=BF16, norm="abs_max_one", decay="strong", segments=2, **PARTS),
    # fp32 on tensor cores: widths that are padded, features in two parts, narrower tiles where gates learn.
    call(T=40, tf32=True, norm=None, K=20, V=24, H_kv=2, decay="token", weighed=True),
    call(T=40, tf32=True, V=144, decay="token", start=True),
    call(T=40, tf32=True, norm=None, K=80, V=160, mask=True),
    call(T=40, tf32=True, K=128, V=72, H=1, decay="head", index="key"),
)  # fmt: skip
def test_every_tile(case: Case) -> None:
    case.check()


def differs(found: Tensor, exact: Tensor, on_gpu: float) -> float:
    """Of what is allowed: the interpreter does not round what goes into a product; a GPU does, in two parts."""
    allowed = 2e-5 if DEVICE == "cpu" else on_gpu
    return ((found.double() - exact).norm() / (allowed * exact.norm())).item()


@checks(*(Case(**{"T": 320, "K": 32, "V": 32, "H": 1, "dtype": BF16, "causal": True} | options) for options in (
    {"decay": "token", "norm": None},
    {"decay": "head", "norm": None},
    {"decay": "token", "start": True},
    {"decay": "head", "T": 130, "H": 2, "K": 48, "V": 160},  # in parts of values
    {"decay": "token", "norm": "abs_max_one", "causal": False, "index": "key", "H": 2},
    {"decay": "strong"},
    {"decay": "strong", "weighed": True},
)))  # fmt: skip
def test_the_gradient_of_a_learned_decay_keeps_its_digits(case: Case) -> None:
    """A difference of dots that two walks make, over more than one mark: nothing it is made of may be rounded.

    Nor may the output, which is, for the share of the denominator.
    """
    found, exact = case.evaluate()["d log_decay"], case.evaluate("reference", exactly=True)["d log_decay"]
    assert differs(found, exact, 2**-9) <= 1
    assert differs(found.sum(-1), exact.sum(-1), 2**-9) <= 1


@checks(*(call(decay=decay, norm=None, dtype=BF16, weighed=True, T=70, H=H) for decay in ("token", "strong")
          for H in (1, 2)))  # fmt: skip
def test_the_gradient_of_a_weight_keeps_its_digits(case: Case) -> None:
    """k . dk with its diagonal, which the decay's gradient leaves out; a weight of 0 gives 0 and gets 0."""
    case = copy.copy(case)
    case.t["log_input"][:, :, 3::7] = -torch.inf
    found, exact = case.evaluate()["d log_input"], case.evaluate("reference", exactly=True)["d log_input"]
    assert differs(found, exact, 2**-8) <= 1
    assert found[:, :, 3::7].eq(0).all()


@pytest.mark.parametrize("names", ["v", "q v", "k v", "v log_decay", "v log_input", "v kv z"])
def test_gradients_of_some_inputs(names: str) -> None:
    """The same as beside all others: of v alone, and of gates and states, whose walks they share."""
    case = call(H_kv=2, decay="token", weighed=True, start=True, T=40)
    everything, some = case.evaluate(), names.split()
    leaves = {name: x.detach().requires_grad_(name in some) for name, x in case.t.items()}
    results = case(leaves, "triton")
    weights = {name: torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
               for name, x in results.items()}  # fmt: skip
    loss = sum((x * weights[name]).sum() for name, x in results.items())
    for name, grad in zip(some, torch.autograd.grad(loss, [leaves[name] for name in some]), strict=True):
        torch.testing.assert_close(grad, everything[f"d {name}"], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_learned_decay_in_fp32() -> None:
    """As good as plain PyTorch: rounding of the dots does not gather over a stretch."""
    case, name = call(T=300, K=32, V=32, H=1, decay="token", norm=None), "d log_decay"
    exact, plain, found = (case.evaluate(*how)[name] for how in (("reference", True), ("reference",), ("triton",)))
    assert (found - exact).norm() <= 2 * (plain - exact).norm() + 2**-23 * exact.norm()


@pytest.mark.parametrize("index", ["query", "key"])
def test_a_decay_behind_all_that_the_loss_sees_has_a_gradient_of_zero(index: str) -> None:
    """What rounding leaves of a stretch is taken off where there are dots, not behind them."""
    case = call(T=150, K=32, V=32, decay="token", index=index)
    a = case.t["log_decay"].requires_grad_()
    found = torch.autograd.grad(case(case.t, "triton")["output"][:, :, :70].square().sum(), a)[0]
    assert found[..., 1:69].ne(0).all()
    assert found[..., 71:].eq(0).all()


@pytest.mark.parametrize("index", ["query", "key"])
def test_one_closed_gate_beside_steep_ones(index: str) -> None:
    """It sends its whole row to the exact form."""
    case = Case(decay="steep", dtype=BF16, causal=index == "query", index=index, T=150, H=4, H_kv=2)
    case.t["log_decay"][:, 0, 70] = -torch.inf
    assert all(x.isfinite().all() for x in case.check().values())


@pytest.mark.parametrize("trial", [{}, APART["trial"]], ids=["inside", "apart"])
@pytest.mark.parametrize("causal", [True, False])
def test_row_sums_that_are_small_differences_keep_their_digits(causal: bool, trial: dict[str, Any]) -> None:
    """Signed keys under a decay, of which neither a key with its factor nor a sum is rounded to 16 bits."""
    case = Case(T=150, K=32, dtype=BF16, decay="token" if causal else "steep", signed=True, trial=trial)
    q, k, v, a = (case.t[name] for name in ("q", "k", "v", "log_decay"))
    with forced(case):
        found = triton_causal(q, k, v, None, None, a, None, None, False, 1, 1e-6, BF16, False, not causal)[1]
    f = a.double().cumsum(-1)
    weights = (f[..., :, None] - f[..., None, :]).exp().tril()
    if not causal:
        # Against time a token's decay is that of the step towards it, and no token sees itself.
        g = f - a.double()
        back = (g[..., None, :] - g[..., :, None]).exp().triu(1)
        weights = torch.stack([weights + back, back])
    pairs, sizes = (torch.einsum("bhik,bgjk->bhij", x, y) * weights for x, y in
                    ((q.double(), k.double()), (q.double().abs(), k.double().abs())))  # fmt: skip
    assert ((found.double() - pairs.sum(-1)).abs() <= 2**-18 * sizes.sum(-1)).all()


@pytest.mark.parametrize("decay", [None, "token"])
def test_a_state_is_handed_over(decay: str | None) -> None:
    case = call(decay=decay, H_kv=2, final=True)
    whole, state, parts = case(case.t, "triton"), {}, []
    for first, end in ((0, 37), (37, 70), (70, 100)):
        part = call(T=end - first, decay=decay, H_kv=2, final=True, start=first > 0)
        now = {name: x[:, :, first:end] for name, x in case.t.items()}
        found = part(now | state, "triton")
        state = {name: found[f"final {name}"] for name in ("kv", "z")}
        parts.append(found["output"])
    torch.testing.assert_close(torch.cat(parts, 2), whole["output"])
    torch.testing.assert_close(state["kv"], whole["final kv"])


@checks(
    call(decay="token", start=True, T=70, K=24, V=20),
    both(T=70, K=24, V=20),
    both(T=130, K=32, V=32, dtype=BF16, segments=2),
    call(decay="head", dtype=BF16, T=200, segments=2),
)
def test_nothing_is_read_that_nobody_wrote_and_runs_are_equal(case: Case) -> None:
    case.assert_repeats()


Seen = list[dict[str, Any]]


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The constants of what walks; torch's own products are set as training in bf16 sets them."""
    seen, real = [], passes.launch

    def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        seen.extend([constants] if "PREC" in constants else [])
        real(kernel, programs, *args, **constants)

    monkeypatch.setattr(passes, "launch", launch)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield seen
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (call(T=20), ["ieee"] * 4),
        (call(T=20, tf32=True), ["tf32"] * 4),
        (call(T=20, dtype=FP16), ["tf32"] * 4),
        # Gradients of a learned decay are made of parts: dq and dk in three products.
        (call(T=20, tf32=True, decay="token"), ["tf32", "tf32x3", "tf32x3", "tf32"]),
    ],
    ids=str,
)
def test_digits_of_products(case: Case, expected: list[str], sweeps: Seen) -> None:
    """What the caller wants, whatever torch is set to."""
    case.evaluate()
    assert [constants["PREC"] for constants in sweeps] == expected


@pytest.mark.parametrize("how", ["bf16", "autocast", "fp32", "mask", "state"])
def test_zeros_multiplies_features_in_tf32(how: str, sweeps: Seen) -> None:
    """With inputs in 16 bits and autocast, but never its sums over tokens, nor what it cannot centre."""
    dtype = FP32 if how in ("autocast", "fp32") else BF16
    mechanism = create_mechanism("zeros", num_heads=1, head_dim=16, causal=True, impl="triton").to(DEVICE, dtype)
    q = torch.zeros(1, 1, 8, 16, dtype=dtype, device=DEVICE, requires_grad=True)
    x = torch.zeros(1, 8, 16, dtype=dtype, device=DEVICE)
    with torch.autocast(DEVICE, BF16, enabled=how == "autocast"):
        if how == "state":
            out = mechanism.with_state(q, q, q, x=x).output
        else:
            mask = torch.ones(1, 8, dtype=torch.bool, device=DEVICE) if how == "mask" else None
            out = mechanism(q, q, q, x=x, key_mask=mask)
    out.float().sum().backward()
    found = {(c["X"] > 1, c["PREC"]) for c in sweeps}
    assert found == {(False, "ieee"), (True, "tf32" if how in ("bf16", "autocast") else "ieee")}


def test_a_width_that_no_kernel_has() -> None:
    q = torch.zeros(1, 1, 4, 257, device=DEVICE)
    with pytest.raises(ValueError, match="up to 256 features"):
        linear_attention(q, q, q, causal=True, impl="triton")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("width", "config"), CONFIGS)
@pytest.mark.parametrize("decay", [None, "token"])
def test_every_config(width: int, config: dict[str, int], decay: str | None) -> None:
    case = call(K=width, V=width, T=500, H=4, H_kv=4, dtype=BF16, decay=decay, segments=2,
                trial=dict.fromkeys(ROLES, config))  # fmt: skip
    case.check()
    case.assert_repeats()


LARGE = [{"norm": None}, {}, {"norm": None, "decay": "token"}, {"norm": "abs_max_one", "decay": "head"}]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("dtype", "tf32"), [(BF16, False), (FP16, False), (FP32, False), (FP32, True)], ids=str)
@pytest.mark.parametrize(
    ("K", "V"), [(16, 16), (32, 32), (64, 64), (128, 128), (64, 128), (128, 256), (96, 80), (256, 256), (2, 33)]
)
@pytest.mark.parametrize(
    "options", [*LARGE, {"decay": "token", "causal": False}, {"start": True, "mask": True}], ids=str
)
def test_every_width(K: int, V: int, dtype: torch.dtype, tf32: bool, options: dict[str, Any]) -> None:
    call(**{"B": 2, "H": 4, "H_kv": 2, "T": 700, "K": K, "V": V, "dtype": dtype, "tf32": tf32} | options).check()


@pytest.mark.gpu
@gpu
@checks(
    # Where the assembler once lost the gradient of a row sum, see ``added_after``.
    *(call(**{"T": 130, "K": K, "V": 16, "dtype": BF16} | options) for K in (80, 96, 128)
      for options in ({"start": True}, {"mask": True, "H_kv": 2}, {"mask": True, "start": True})),
    # Few heads: the device's own choice of segments, unlike in the small tests.
    *(call(T=5000, K=64, V=64, dtype=BF16, decay=decay, start=True) for decay in (None, "token")),
)  # fmt: skip
def test_what_shows_on_a_gpu(case: Case) -> None:
    case.check()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("K", [80, 128, 256])
@pytest.mark.parametrize("options", [
    {"start": True}, {"decay": "head", "norm": "abs_max_one"}, {"decay": "token", "causal": False}, {"decay": "steep"},
    {"decay": "token", "cu": (0, 5, 5, 300, 700), "start": True}, {"mask": True, "B": 2},
], ids=str)  # fmt: skip
def test_row_sums_of_wide_heads(K: int, options: dict[str, Any]) -> None:
    """Several chunks ahead in flight, in one warp; and twice the same bits."""
    case = call(**{"T": 600, "K": K, "V": 128, "H": 4, "H_kv": 2, "dtype": BF16, "segments": 2} | APART | options)
    case.check()
    case.assert_repeats()
