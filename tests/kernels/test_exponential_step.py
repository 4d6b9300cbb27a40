"""A step of exponential attention as one kernel: gates of any size, long chains, hand-over, gradients, against fp64."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.budget import ROUNDINGS, assert_within, moved
from kernels.device import DEVICE
from kernels.exponential_case import draw
from linattn import exponential_attention_with_state
from linattn.kernels.exponential.step import exponential_step
from linattn.ops.exponential.call import ExponentialState
from linattn.testing.poison import poisoned_allocations

INF = torch.inf
OF_STATE = "kv", "z", "log_scale"
GATES = "log_input", "log_decay", "log_scale"
OPERATOR = torch.ops.linattn.triton_exponential_step.default


def make(B=2, H=4, H_kv=2, T=1, K=16, V=16, *, state=True, **options):
    return draw(rows=B, heads=(H, H_kv), length=T, width=K, values=V, gate=1.0, state=state, **options)


def attend(t, impl="triton", **options):
    """Output, and the state after the last token."""
    state = ExponentialState(*(t[name] for name in OF_STATE)) if "kv" in t else None
    output, state = exponential_attention_with_state(
        t["q"], t["k"], t["v"], log_input=t["log_input"], log_decay=t["log_decay"], initial_state=state, impl=impl,
        **options,
    )  # fmt: skip
    return {"output": output, **dict(zip(OF_STATE, state, strict=True))}


def with_gradients(t, impl):
    t = {name: x.detach().requires_grad_() for name, x in t.items()}
    found = attend(t, impl)
    g = torch.Generator().manual_seed(9)
    loss = sum((x.double() * torch.randn(x.shape, generator=g).to(DEVICE)).sum() for x in found.values())
    gradients = torch.autograd.grad(loss, list(t.values()))
    return {n: x.detach() for n, x in found.items()} | {f"d {n}": x for n, x in zip(t, gradients, strict=True)}


def exactly(t):
    return {name: x.double() for name, x in t.items()}


def shaken(t):
    """In fp64, each number moved by a few roundings; but what the gates do is known exactly."""
    return {name: x.double() if name in GATES else moved(x) for name, x in t.items()}


def assert_same(found, exact, *plain, **options):
    """Sums as fp64 in the exact unit: they must have taken up what the rounding of their own leaves over."""

    def put(x):
        factor = torch.where(exact["log_scale"] == -INF, 0.0, x["log_scale"].double() - exact["log_scale"]).exp()
        state = {"kv": factor[..., None, None] * x["kv"].double(), "z": factor[..., None] * x["z"].double()}
        return {name: x for name, x in (x | state).items() if name != "log_scale"}

    assert_within(*map(put, (found, exact, *plain)), **options)


def assert_alike(found, expected):
    """Equal up to rounding: a kernel compiled for other arguments may add in another order."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        largest = x.abs().nan_to_num(posinf=0).max().item()
        # Sums in fp32 that differ by a rounding may become neighbours in 16 bits.
        rounding = max(ROUNDINGS, torch.finfo(x.dtype).eps)
        torch.testing.assert_close(found[name], x, rtol=rounding, atol=rounding * largest)


def check(t, **options):
    exact = with_gradients(exactly(t), "recurrent")
    plain, found = with_gradients(t, "recurrent"), with_gradients(t, "triton")
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in plain.items()}
    assert torch.equal(found["log_scale"], exact["log_scale"].float())
    assert_same(found, exact, plain, with_gradients(shaken(t), "recurrent"), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("signed", [False, True])
def test_values_and_gradients(dtype, signed):
    check(make(K=32, V=48, dtype=dtype, signed=signed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_state_is_an_empty_one(dtype):
    """The output of a first token is its v wherever it outweighs the 1: gradients of q and of the gate are rests."""
    t = make(state=False, dtype=dtype)
    with_state = with_gradients(make(dtype=dtype), "recurrent")
    check(t, rests={f"d {name}": ROUNDINGS * with_state[f"d {name}"].abs().max().item() for name in ("q", "log_input")})
    t["log_input"] -= 300  # in whose unit an old sum, if there were one, would be e^300 of what it is
    check(t)
    empty = {"kv": torch.zeros(2, 2, 16, 16), "z": torch.zeros(2, 2, 16), "log_scale": torch.full((2, 2), -INF)}
    found = attend(t | {name: x.to(DEVICE) for name, x in empty.items()})
    assert_alike(found, attend(t))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (5, 130), (20, 40), (128, 33), (256, 80)])
@pytest.mark.parametrize(("H", "H_kv"), [(2, 2), (3, 1)])
def test_widths_and_grouped_heads(K, V, H, H_kv):
    check(make(B=1, H=H, H_kv=H_kv, K=K, V=V))


def test_gates_of_any_size():
    """Every combination, head by head: no exponential of a sum of +-300 may lose digits beside larger ones."""
    i, f, m = torch.cartesian_prod(
        torch.tensor([-300.3, -50.3, 300.1, -INF]), torch.tensor([0.0, -0.7, -300.0, -INF]),
        torch.tensor([-300.3, 0.3, 300.1, -INF]),
    ).T  # fmt: skip
    t = make(B=len(i), H=2, H_kv=1, K=5, V=3)
    gates = {"log_input": i[:, None, None], "log_decay": f[:, None, None], "log_scale": m[:, None]}
    t |= {name: x.to(DEVICE) for name, x in gates.items()}
    results = [with_gradients(x, "recurrent") for x in (exactly(t), t, shaken(t))]
    found = with_gradients(t, "triton")
    assert torch.equal(found["log_scale"], results[0]["log_scale"].float())
    little = found["log_scale"][:, 0] < -100  # there e^{-80} stands for all that is less, as in plain PyTorch
    torch.testing.assert_close(found["output"][little], results[1]["output"][little], rtol=1e-2, atol=1e-38)
    # Where one token outweighs all others the output is its v, and gradients are what rounding leaves of numbers near 1
    # that cancel. In the gradient of q these numbers have a factor k / q.k, which is large where q.k is small.
    g = torch.randn(found["output"].shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    cancelled = (g * t["v"]).abs().sum(-1, keepdim=True) * (t["k"] / (t["q"] * t["k"]).sum(-1, keepdim=True)).abs()
    for n in range(len(i)):
        rests = {f"d {name}": ROUNDINGS for name in t} | {"d q": ROUNDINGS * max(1.0, cancelled[n].max().item())}
        try:
            assert_same(*({name: x[n : n + 1] for name, x in one.items()} for one in (found, *results)), rests=rests)
        except AssertionError as problem:
            raise AssertionError({name: x[n].item() for name, x in gates.items()}) from problem


def test_a_denominator_that_is_a_small_difference_keeps_its_digits():
    """Rounded to bf16 with their factors, keys as well as queries would use more than the budget."""
    t = make(B=40, H=1, H_kv=1, K=64, V=4, dtype=torch.bfloat16, signed=True)
    t["log_input"] += 8
    check(t)


def test_gates_that_are_no_number_are_not_hidden():
    t = make(B=3, H=1, H_kv=1)
    for n, name in enumerate(GATES):
        t[name][n] = torch.nan
    found = attend(t, validate=False)
    assert all(x.isnan().all() for x in found.values())


@torch.no_grad()
def one_by_one(t):
    """As ``attend``, by a launch for each token."""
    state, outputs = {name: t[name] for name in OF_STATE if name in t}, []
    for n in range(t["q"].shape[2]):
        now = {name: x[:, :, n : n + 1] for name, x in t.items() if name not in OF_STATE}
        state = attend(now | state, validate=False)
        outputs.append(state.pop("output"))
    return {"output": torch.cat(outputs, 2), **state}


@pytest.mark.parametrize(("gates", "dtype"), [("mild", torch.bfloat16), ("wild", torch.float32)])
def test_hundreds_of_tokens_one_by_one(gates, dtype):
    """Handed over to whole sequences and back; the first token adds nothing to an empty state."""
    T = 300
    t = make(B=1, H=2, H_kv=1, T=T, K=12, V=20, state=False, dtype=dtype, signed=gates == "mild")
    t["log_input"][..., 0] = -INF
    if gates == "wild":
        t["log_input"][..., 20::61] = 300
        t["log_input"][..., [50, 51, 110]] = -INF
        t["log_input"][..., 130] = -300
        t["log_decay"][..., [40, 100, 101]] = -300
        t["log_decay"][..., [75, 200]] = -INF
    state, outputs, ends = {}, [], {120: one_by_one, 140: "triton", 220: one_by_one, 240: "chunked", T: one_by_one}
    for first, (end, form) in zip([0, *ends], ends.items(), strict=False):
        tokens = {name: x[:, :, first:end] for name, x in t.items()} | state
        state = form(tokens) if callable(form) else attend(tokens, form)
        outputs.append(state.pop("output"))
    plain = [attend(x, form) for x in (t, shaken(t)) for form in ("recurrent", "chunked")]
    assert_same(state | {"output": torch.cat(outputs, 2)}, attend(exactly(t), "recurrent"), *plain)


def strided(t):
    """Heads of a token side by side, as a layer has them, gates beside others, and states of a head together."""
    _, H, _, K = t["q"].shape
    H_kv = t["k"].shape[1]
    qkv = torch.cat([t[name].transpose(1, 2).flatten(2) for name in "qkv"], -1)
    sizes = [H * K, H_kv * K, H_kv * t["v"].shape[3]]
    heads = zip("qkv", qkv.split(sizes, -1), (H, H_kv, H_kv), strict=True)
    apart = {name: x.unflatten(2, (n, -1)).transpose(1, 2) for name, x, n in heads}
    apart["log_input"] = torch.stack([t["log_input"]] * 3, -1)[..., 1]
    return apart | {name: t[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("log_decay", *OF_STATE)}


def test_strides_are_followed():
    t = make(K=20, V=24)
    apart = strided(t)
    apart["kv"] = t["kv"].permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    assert not any(x.is_contiguous() for x in apart.values())
    found = attend(apart)
    assert_alike(found, attend(t))
    assert all(x.is_contiguous() for x in found.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gates_and_units_of_other_dtypes(dtype):
    t = make()
    other = {name: t[name].to(dtype) for name in GATES}
    check(t | other)


class Seen(TorchDispatchMode):
    """What a call does on the device."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_step_is_one_operator(state, gradients):
    t = strided(make(dtype=torch.bfloat16))
    t = {name: x.requires_grad_(gradients) for name, x in t.items() if state or name not in OF_STATE}
    with Seen() as seen:
        attend(t, validate=False)
    assert seen.operators == [OPERATOR]


def test_without_gradients_it_is_the_same():
    t = make(H=6, K=20, V=70)
    with torch.no_grad():
        found = attend(t)
    expected = attend({name: x.requires_grad_() for name, x in t.items()})
    assert [name for name, x in expected.items() if x.requires_grad] == ["output", "kv", "z"]
    for name, x in expected.items():
        assert torch.equal(found[name], x)


def test_nothing_unwritten_is_read_and_runs_are_bit_equal():
    t = make(K=128, V=70)  # three programs a head, the last one's columns not full
    for tensors in (t, {name: x for name, x in t.items() if name not in OF_STATE}):
        expected = attend(tensors)
        with poisoned_allocations():
            found = attend(tensors)
        assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_operator_is_registered_well():
    t = {name: x.requires_grad_() for name, x in make(K=5, V=3).items()}
    inputs = [t[name] for name in ("q", "k", "v", "log_input", "log_decay", *OF_STATE)]
    empty = *(x.detach().bfloat16() for x in inputs[:5]), None, None, None
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    for given in (inputs, empty):
        torch.library.opcheck(exponential_step, (*given, 0.25, torch.float32), test_utils=tests)


def test_traced_whole():
    """One node of a graph, whose gradient is the same."""
    nodes = []

    def look(graph, _):
        nodes.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    def gradients(run):
        t = {name: x.requires_grad_() for name, x in make().items()}
        found = list(run(t).values())
        return [*found, *torch.autograd.grad(sum(x.sum() for x in found), list(t.values()))]

    compiled = torch.compile(attend, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
    for a, b in zip(gradients(compiled), gradients(attend), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert nodes.count(OPERATOR) == 1
