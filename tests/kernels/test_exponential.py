"""Exponential attention and its step, by kernels: gates of any size, long chains, states and options, against fp64."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.budget import BF16, FP16, FP32, ROUNDINGS, Tensors, assert_within, evaluate, moved
from kernels.case import Case, checks, laid
from kernels.device import DEVICE
from linattn.kernels.exponential.config import D_K, D_Q, OUTPUT
from linattn.testing.poison import poisoned_allocations

INF = torch.inf
OF_STATE = "kv", "z", "unit"
GATES = "log_input", "log_decay", "unit"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def call(**options: Any) -> Case:
    return Case(**{"gate": 2.0, "T": 19, "decay": "token", "norm": None, "causal": True} | options)


def long(change: str, **options: Any) -> Case:
    """A decay that no factor in fp32 holds cuts chunks short, one that forgets everything to single tokens."""
    case = call(**{"T": 70, "start": True} | options)
    decay, weight = case.t["log_decay"], case.t["log_input"]
    if change == "steep":
        decay *= 40
    if change == "steep from the middle":
        decay[..., case.T // 2 :] *= 40
    if change == "closed":
        decay[..., [7, 40, 41]], weight[..., [3, 9, 41]] = -INF, -INF
    return case


# Parts are of two bf16 numbers. The interpreter, which cannot multiply them, is told to take fp32 in parts.
WIDE = {"K": 128, "V": 64, "dtype": BF16} if DEVICE == "cuda" else {
    "trial": {OUTPUT: {"parts": 8}, D_Q: {"parts": 16}, D_K: {"parts": 16}}
}  # fmt: skip
APART = {"trial": {OUTPUT: {"apart": 1}}}  # row sums in a kernel of their own


@checks(
    *(call(B=2, gate=gate, final=True) for gate in (0.1, 2.0, 20.0)),
    call(B=2, start=True),
    call(start=True, cu=(0, 5, 5, 19)),
    call(B=2, K=20, V=9, dtype=BF16, final=True),
    call(B=2, dtype=FP16, gate=20.0, final=True),
    call(B=2, mask=True, final=True),
    call(B=2, H_kv=2, layout="tokens"),
    # Signed keys: a denominator that is a small difference keeps its digits.
    call(T=70, dtype=BF16, signed=True, gate=1.0),
    call(T=70, dtype=BF16, signed=True, gate=1.0, **APART),
    call(start=True, cu=(0, 5, 5, 19), **APART),
    *(long(change) for change in ("", "steep", "closed")),
    long("", T=150, segments=2),
    long("steep from the middle", **WIDE),
    long("steep from the middle", T=150, K=48, segments=2, **APART),
)  # fmt: skip
def test_values_and_gradients(case: Case) -> None:
    case.check()


def test_strong_decays_have_a_gradient_through_a_rounded_output() -> None:
    """q . dq taken as 0 while k . dk knows an output rounded to bf16: the decays got twice their budget and more."""
    case, name = call(T=100, dtype=BF16, K=32, V=32, gate=1.0, final=True), "d log_decay"
    case.t["log_decay"] *= 200
    found, plain, exact = (case.evaluate(*how) for how in (("triton",), ("reference",), ("reference", True)))
    assert_within({name: found[name]}, {name: exact[name]}, {name: plain[name]}, inputs=BF16)


def test_an_empty_sequence_hands_its_state_on() -> None:
    """Its unit is a constant, so that of the first one gets the gradient of the sums."""
    case = call(start=True, cu=(0, 5, 5, 19))
    found = case.evaluate()
    for name in OF_STATE:
        assert torch.equal(found[f"final {name}"][1], case.t[name][1])
    whole = sum((case.t[name] * found[f"d {name}"])[1].flatten(1).sum(1) for name in ("kv", "z"))
    torch.testing.assert_close(found["d unit"][1], whole, rtol=1e-5, atol=1e-5)
    assert whole.abs().min() > 0.1


def test_a_query_of_zeros_has_a_finite_gradient() -> None:
    case = call(B=2, gate=20.0)
    case.t["q"].zero_()
    assert all(x.isfinite().all() for x in case.evaluate().values())


# A step: one token with a state, by a kernel of its own.


def step(**options: Any) -> Case:
    return call(**{"B": 2, "H": 4, "H_kv": 2, "T": 1, "gate": 1.0, "start": True} | options)


def empty(case: Case) -> Tensors:
    """The tensors of a step, with an empty state."""
    zeros = {name: torch.zeros_like(case.t[name]) for name in ("kv", "z")}
    return case.t | zeros | {"unit": torch.full_like(case.t["unit"], -INF)}


def hold(case: Case, *, rests: dict[str, float] | None = None, t: Tensors | None = None) -> None:
    """Sums as fp64 in the exact unit: they must have taken up what the rounding of their own leaves over.

    What the gates do is known exactly.
    """
    t = case.t if t is None else t
    exactly = {name: x.double() for name, x in t.items()}
    shaken = {name: x.double() if name in GATES else moved(x) for name, x in t.items()}
    exact, *plain = (evaluate(case, x, "recurrent", case.dtype) for x in (exactly, t, shaken))
    with poisoned_allocations():
        found = evaluate(case, t, "triton", case.dtype)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in plain[0].items()}
    assert torch.equal(found["final unit"], exact["final unit"].float())
    assert_within(*(put(x, exact) for x in (found, exact, *plain)), inputs=case.dtype, rests=rests)


def put(x: Tensors, exact: Tensors) -> Tensors:
    unit = exact["final unit"]
    factor = torch.where(unit == -INF, 0.0, x["final unit"].double() - unit).exp()
    state = {"final kv": factor[..., None, None] * x["final kv"].double(),
             "final z": factor[..., None] * x["final z"].double()}  # fmt: skip
    return {name: value for name, value in (x | state).items() if name != "final unit"}


@checks(
    *(step(K=32, V=48, dtype=dtype, signed=signed) for dtype in (FP32, BF16, FP16) for signed in (False, True)),
    *(step(B=1, H=H, H_kv=H_kv, K=K, V=V) for K, V in ((1, 1), (5, 130), (20, 40), (128, 33), (256, 80))
      for H, H_kv in ((2, 2), (3, 1))),
    step(K=20, V=24, H_kv=4, layout="tokens"),
)  # fmt: skip
def test_a_step(case: Case) -> None:
    hold(case)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64], ids=str)
def test_gates_and_units_of_other_dtypes(dtype: torch.dtype) -> None:
    case = step()
    hold(case, t=case.t | {name: case.t[name].to(dtype) for name in GATES})


def test_a_denominator_that_is_a_small_difference_keeps_its_digits() -> None:
    """Rounded to bf16 with their factors, keys as well as queries would use more than the budget."""
    case = step(B=40, H=1, H_kv=1, K=64, V=4, dtype=BF16, signed=True)
    case.t["log_input"] += 8
    hold(case)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_no_state_is_an_empty_one(dtype: torch.dtype) -> None:
    """The output of a first token is its v wherever it outweighs the 1: gradients of q and of the gate are rests."""
    case, other = step(dtype=dtype, start=False, final=True), step(dtype=dtype)
    sizes = evaluate(other, other.t, "recurrent", dtype)
    hold(case, rests={f"d {n}": ROUNDINGS * sizes[f"d {n}"].abs().max().item() for n in ("q", "log_input")})
    case.t["log_input"] -= 300  # in whose unit an old sum, if there were one, would be e^300 of what it is
    hold(case)
    found, expected = other(empty(other) | case.t, "triton"), case(case.t, "triton")
    for name, x in expected.items():
        rounding = max(ROUNDINGS, torch.finfo(x.dtype).eps)
        largest = x.abs().nan_to_num(posinf=0).max().item()
        torch.testing.assert_close(found[name], x, rtol=rounding, atol=rounding * largest)


def test_gates_of_any_size() -> None:
    """Every combination, head by head: no exponential of a sum of +-300 may lose digits beside larger ones."""
    i, f, m = torch.cartesian_prod(
        torch.tensor([-300.3, -50.3, 300.1, -INF]), torch.tensor([0.0, -0.7, -300.0, -INF]),
        torch.tensor([-300.3, 0.3, 300.1, -INF]),
    ).T  # fmt: skip
    case = step(B=len(i), H=2, H_kv=1, K=5, V=3)
    gates = {"log_input": i[:, None, None], "log_decay": f[:, None, None], "unit": m[:, None]}
    t = case.t | {name: x.to(DEVICE) for name, x in gates.items()}
    exactly = {name: x.double() for name, x in t.items()}
    shaken = {name: x.double() if name in GATES else moved(x) for name, x in t.items()}
    exact, *plain = (evaluate(case, x, "recurrent") for x in (exactly, t, shaken))
    found = evaluate(case, t, "triton")
    assert torch.equal(found["final unit"], exact["final unit"].float())
    little = found["final unit"][:, 0] < -100  # there e^{-80} stands for all that is less, as in plain PyTorch
    torch.testing.assert_close(found["output"][little], plain[0]["output"][little], rtol=1e-2, atol=1e-38)
    # Where one token outweighs all others the output is its v, and gradients are what rounding leaves of numbers near 1
    # that cancel. In the gradient of q these numbers have a factor k / q.k, which is large where q.k is small.
    cancelled = 4 * t["v"].abs().sum(-1, keepdim=True) * (t["k"] / (t["q"] * t["k"]).sum(-1, keepdim=True)).abs()
    results = [put(x, exact) for x in (found, exact, *plain)]
    for n in range(len(i)):
        rests = {f"d {name}": ROUNDINGS for name in t} | {"d q": ROUNDINGS * max(1.0, cancelled[n].max().item())}
        try:
            assert_within(*({name: x[n : n + 1] for name, x in one.items()} for one in results), rests=rests)
        except AssertionError as problem:
            raise AssertionError({name: x[n].item() for name, x in gates.items()}) from problem


def test_gates_that_are_no_number_are_not_hidden() -> None:
    case = step(B=3, H=1, H_kv=1)
    for n, name in enumerate(GATES):
        case.t[name][n] = torch.nan
    assert all(x.isnan().all() for x in case(case.t, "triton").values())


@torch.no_grad()
def one_by_one(t: Tensors, dtype: torch.dtype) -> Tensors:
    """By a launch for each token."""
    state, outputs = {name: t[name] for name in OF_STATE if name in t}, []
    for n in range(t["q"].shape[2]):
        now = {name: x[:, :, n : n + 1] for name, x in t.items() if name not in OF_STATE}
        found = call(T=1, dtype=dtype, start=bool(state), final=True)(now | state, "triton")
        outputs.append(found.pop("output"))
        state = {name.removeprefix("final "): x for name, x in found.items()}
    return {"output": torch.cat(outputs, 2)} | {f"final {name}": x for name, x in state.items()}


@pytest.mark.parametrize(("gates", "dtype"), [("mild", BF16), ("wild", FP32)])
def test_hundreds_of_tokens_one_by_one(gates: str, dtype: torch.dtype) -> None:
    """Handed over to whole sequences and back; the first token adds nothing to an empty state."""
    case = call(T=300, K=12, V=20, dtype=dtype, gate=1.0, signed=gates == "mild", final=True)
    t = case.t
    t["log_input"][..., 0] = -INF
    if gates == "wild":
        t["log_input"][..., 20::61], t["log_input"][..., [50, 51, 110]], t["log_input"][..., 130] = 300, -INF, -300
        t["log_decay"][..., [40, 100, 101]], t["log_decay"][..., [75, 200]] = -300, -INF
    state, outputs, first = {}, [], 0
    for end, form in {120: "", 140: "triton", 220: "", 240: "chunked", 300: ""}.items():
        tokens = {name: x[:, :, first:end] for name, x in t.items()} | state
        pieces = call(dtype=dtype, start=bool(state), final=True)
        found = pieces(tokens, form) if form else one_by_one(tokens, dtype)
        outputs.append(found.pop("output"))
        state, first = {name.removeprefix("final "): x for name, x in found.items()}, end
    found |= {"output": torch.cat(outputs, 2)}
    exactly = {name: x.double() for name, x in t.items()}
    shaken = {name: x if name in GATES else moved(t[name]) for name, x in exactly.items()}
    exact, *plain = (case(x, form) for x, form in (
        (exactly, "recurrent"), (t, "recurrent"), (t, "chunked"), (shaken, "recurrent"), (shaken, "chunked"),
    ))  # fmt: skip
    assert_within(*(put(x, exact) for x in (found, exact, *plain)))


@checks(
    step(K=128, V=70),  # three programs a head, the last one's columns not full
    step(K=128, V=70, start=False, final=True),
    call(B=2, start=True),
)
def test_nothing_unwritten_is_read_and_runs_are_bit_equal(case: Case) -> None:
    case.assert_repeats()


def test_strides_of_states_and_gates_are_followed() -> None:
    case = step(K=20, V=24)
    apart = {name: laid(x, "columns") for name, x in case.t.items()}
    apart["kv"] = case.t["kv"].permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    found = case(apart, "triton")
    assert all(x.is_contiguous() for x in found.values())
    for name, x in case(case.t, "triton").items():
        torch.testing.assert_close(found[name], x, rtol=ROUNDINGS, atol=ROUNDINGS)


class Seen(TorchDispatchMode):
    """What a call does on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += [] if func.is_view else [func]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_step_is_one_operator(start: bool, gradients: bool) -> None:
    case = step(dtype=BF16, start=start, final=True, layout="tokens")
    t = {name: x.detach().requires_grad_(gradients) for name, x in case.t.items()}
    with Seen() as seen:
        case(t, "triton")
    assert seen.operators == [torch.ops.linattn.triton_exponential_step.default]


def test_without_gradients_it_is_the_same() -> None:
    case = step(H=6, K=20, V=70)
    with torch.no_grad():
        found = case(case.t, "triton")
    expected = case({name: x.detach().requires_grad_() for name, x in case.t.items()}, "triton")
    assert [name for name, x in expected.items() if x.requires_grad] == ["output", "final kv", "final z"]
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.gpu
@gpu
@checks(*(call(K=64, V=128, T=1500, dtype=dtype, signed=signed, gate=1.0, final=True) for dtype in (FP32, BF16, FP16)
          for signed in (False, True)))  # fmt: skip
def test_long_sequences(case: Case) -> None:
    case.check()
