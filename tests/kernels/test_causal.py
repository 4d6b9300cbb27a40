"""Causal attention and both ways on Triton kernels, against the reference in fp64."""

import pytest
import torch
from torch import Tensor

from kernels.causal_case import Case, check, segments
from kernels.device import DEVICE
from linattn.kernels.causal.attend import attend_causal
from linattn.kernels.causal.library import triton_causal, triton_causal_backward
from linattn.kernels.causal.widths import missing_of_both
from linattn.testing.poison import poisoned_allocations


@pytest.mark.parametrize("norm", [None, "sum", "abs_max_one"])
@pytest.mark.parametrize(("decay", "index"), [(None, "query"), ("token", "query"), ("token", "key"), ("head", "key")])
def test_values_and_gradients(decay: str | None, index: str, norm: str | None) -> None:
    check(Case(decay=decay, index=index, norm=norm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "norm"), [(None, None), (None, "sum"), ("token", "sum"), ("strong", "abs_max_one")])
def test_low_precision(dtype: torch.dtype, decay: str | None, norm: str | None) -> None:
    check(Case(dtype=dtype, decay=decay, norm=norm, T=100))


@pytest.mark.parametrize(("both", "index"), [(False, "query"), (True, "key")])
def test_the_steepest_decay_in_factors(both: bool, index: str) -> None:
    """Factors up to exp(55) inside a chunk, grouped heads; one closed gate sends its whole row to the exact form."""
    case = Case(decay="steep", dtype=torch.bfloat16, both=both, index=index, T=150, H=4, H_kv=2)
    check(case)
    case.a = case.a.detach().clone()
    case.a[:, 0, 70] = -torch.inf
    found = check(case)
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("options", [
    {"decay": "token", "norm": None},
    {"decay": "head", "norm": None},
    {"decay": "token", "norm": "sum", "state": True},
    {"decay": "head", "norm": "sum", "T": 130, "H": 2, "K": 48, "V": 160},  # in parts of values
    {"decay": "token", "norm": "abs_max_one", "both": True, "index": "key", "H": 2},
    {"decay": "strong", "norm": "sum"},
    {"decay": "strong", "norm": "sum", "weighed": True},
])  # fmt: skip
def test_the_gradient_of_a_learned_decay_keeps_its_digits(options: dict) -> None:
    """A difference of dots that two walks make, over more than one mark: nothing it is made of may be rounded.

    Nor may the output, which is, for the share of the denominator.
    """
    case = Case(**{"T": 320, "K": 32, "V": 32, "H": 1, "dtype": torch.bfloat16, **options})
    found, exact = case.kernels()["da"].double(), case.reference(torch.float64)["da"]
    # The interpreter does not round what goes into a product; a GPU does, in two parts.
    allowed = 2e-5 if DEVICE == "cpu" else 2**-9
    assert (found - exact).norm() <= allowed * exact.norm()
    assert (found.sum(-1) - exact.sum(-1)).norm() <= allowed * exact.sum(-1).norm()


WEIGHED = [
    (1, {"decay": "token", "norm": None, "dtype": torch.bfloat16, "state": True, "H": 4, "H_kv": 2, "T": 150}),
    (1, {"decay": "strong", "norm": "sum", "dtype": torch.bfloat16, "state": True, "H": 4, "H_kv": 2, "T": 70}),
    (1, {"decay": "token", "norm": "abs_max_one", "index": "key", "mask": True, "B": 2, "T": 70}),
    (1, {"decay": None, "norm": "sum", "T": 70}),
    (1, {"decay": "steep", "norm": None, "dtype": torch.bfloat16, "both": True, "T": 70}),
    (1, {"decay": "token", "norm": "sum", "dtype": torch.float16, "both": True, "index": "key", "T": 70}),
    (2, {"decay": "token", "norm": "sum", "dtype": torch.bfloat16, "state": True, "cu": (0, 5, 5, 70, 130)}),
    (2, {"decay": "token", "norm": "sum", "dtype": torch.bfloat16, "state": True, "V": 160, "T": 130}),
]  # fmt: skip


@pytest.mark.parametrize(("count", "options"), WEIGHED)
def test_weights_of_keys(count: int, options: dict) -> None:
    with segments(count), poisoned_allocations():
        found = check(Case(weighed=True, **options))
    assert found["di"].isfinite().all()


@pytest.mark.parametrize("decay", ["token", "strong"])
@pytest.mark.parametrize("H", [1, 2])
def test_the_gradient_of_a_weight_alone_and_with_that_of_the_decay(decay: str, H: int) -> None:
    """k . dk with its diagonal, which the decay's gradient leaves out; a weight of 0 gives 0 and gets 0."""
    case = Case(decay=decay, norm=None, dtype=torch.bfloat16, weighed=True, T=70, H=H)
    case.i[:, :, 3::7] = -torch.inf
    both, exact = case.kernels(), case.reference(torch.float64)
    assert (both["di"].double() - exact["di"]).norm() <= (2e-5 if DEVICE == "cpu" else 2**-8) * exact["di"].norm()
    assert both["di"][:, :, 3::7].eq(0).all()
    q, k, v, i = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v, case.i))
    a = case.a.detach().clone().requires_grad_()
    options = {"decay_index": "query", "normalizer": None, "eps": 0.0, "out_dtype": torch.bfloat16}
    alone = attend_causal(q, k, v, log_decay=a.detach(), log_input=i, **options).output
    assert torch.equal(torch.autograd.grad(alone, i, case.d_out)[0], both["di"])
    other = attend_causal(q, k, v, log_decay=a, log_input=i.detach(), **options).output
    assert torch.equal(torch.autograd.grad(other, a, case.d_out)[0], both["da"])


def test_the_gradient_of_a_learned_decay_in_fp32() -> None:
    """As good as plain PyTorch: rounding of the dots does not gather over a stretch."""
    case = Case(T=300, K=32, V=32, H=1, decay="token", norm=None)
    exact, plain, found = (
        x["da"].double() for x in (case.reference(torch.float64), case.reference(torch.float32), case.kernels())
    )
    assert (found - exact).norm() <= 2 * (plain - exact).norm() + 2**-23 * exact.norm()


@pytest.mark.parametrize("index", ["query", "key"])
def test_a_decay_behind_all_that_the_loss_sees_has_a_gradient_of_zero(index: str) -> None:
    """What rounding leaves of a stretch is taken off where there are dots, not behind them."""
    case = Case(T=150, K=32, V=32, H=2, decay="token", norm="sum", index=index)
    case.d_out[:, :, 70:] = 0
    found = case.kernels()["da"]
    assert found[..., 1:69].ne(0).all()
    assert found[..., 71:].eq(0).all()


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


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("K", "V"), [(200, 16), (24, 136)])
def test_narrow_beside_wide_under_shared_heads(K: int, V: int, both: bool) -> None:
    """Their products are made wider: see ``missing_of_both``."""
    case = Case(K=K, V=V, H=3, H_kv=1, T=70, dtype=torch.bfloat16, decay="token", both=both, state=not both)
    more_k, more_v = missing_of_both(case.q, case.k, case.v)
    assert min(K + more_k, V + more_v) == 64
    assert (K + more_k) % 16 == (V + more_v) % 16 == 0
    check(case)


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


@pytest.mark.parametrize(("both", "decay"), [(False, "token"), (True, "head")])
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


@pytest.mark.parametrize(
    ("index", "decay", "norm"), [("query", "token", "sum"), ("key", "head", None), ("query", "token", "abs_max_one")]
)
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
    """Another layout is another kernel, which may sum in another order: each is held to the definition."""
    case = Case(H_kv=2, decay="token")
    packed = torch.stack([x.transpose(1, 2) for x in (case.q, case.k, case.v)], dim=2)  # (B, T, 3, H, D)
    case.q, case.k, case.v = packed.permute(2, 0, 3, 1, 4).unbind()
    assert not case.q.is_contiguous()
    case.a = case.a.transpose(1, 2).contiguous().transpose(1, 2)
    check(case)
    case.q, case.k, case.v = (x.mT.contiguous().mT for x in (case.q, case.k, case.v))
    assert case.q.stride(3) != 1
    check(case)


def test_operators_are_registered_well() -> None:
    case = Case(T=20, decay="token", state=True)
    q, k, v, a = (x.requires_grad_() for x in (case.q, case.k, case.v, case.a))
    args = (q, k, v, *case.initial, a, None, None, True, 1, 1e-6, torch.float32, True, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_causal, args, test_utils=tests)
    out, den, *_ = triton_causal(*args)
    for more in ((torch.zeros_like(a, requires_grad=True),), (None, True)):
        torch.library.opcheck(triton_causal, (*args, *more), test_utils=tests)
    args = (out, *case.d_state, q, k, v, *case.initial, a, None, None, out, den, True, 1, 1e-6, False, True)
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    for more in ((), (torch.zeros_like(args[8]), True), (None, False, True, False, False)):
        torch.library.opcheck(triton_causal_backward, (*args, *more), test_utils=("test_schema", "test_faketensor"))


def test_a_width_that_no_kernel_has() -> None:
    q = torch.zeros(1, 1, 4, 257, device=DEVICE)
    with pytest.raises(ValueError, match="1 to 256 features"):
        attend_causal(
            q, q, q, log_decay=None, decay_index="query", normalizer=None, eps=0.0, out_dtype=torch.float32
        )  # fmt: skip
