"""The bidirectional kernels against the fp64 specification: values and gradients, on every path, with every option."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linattn import linear_attention_with_state
from linattn.ops.triton import bidirectional_config as config
from linattn.ops.triton import bidirectional_launch as launch
from linattn.ops.triton.bidirectional import attend_all
from linattn.ops.triton.bidirectional_config import Config
from linattn.ops.triton.bidirectional_library import bidirectional
from linattn.ops.types import LinearState
from linattn.testing.poison import poisoned_allocations
from ops.triton.device import DEVICE

PATHS = ["short", "long", "wide"]
NAMES = ["output", "kv", "k", "dq", "dk", "dv", "d_kv", "d_k"]


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes small shapes take the path of large ones, in several segments."""
    if request.param != "short":
        monkeypatch.setattr(config, "SHORT", -1)
        monkeypatch.setattr(config, "TILES_PER_SEGMENT", 1)
    if request.param == "wide":
        monkeypatch.setattr(config, "WIDE", dict.fromkeys(config.WIDE, 0))
    return request.param


on_all_paths = pytest.mark.parametrize("path", PATHS, indirect=True)


def inputs(
    dtype: torch.dtype = torch.float32, B: int = 2, H: int = 2, H_kv: int = 2, Tq: int = 70, Tk: int = 70,
    K: int = 16, V: int = 16, positive: bool = True, state: bool = False, n: int | None = None,
) -> dict:  # fmt: skip
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v = draw(B, H, Tq, K), draw(B, H_kv, Tk, K), draw(B, H_kv, Tk, V) + 0.5
    if positive:
        q, k = q.abs(), k.abs()
    q, k, v = (x.to(dtype).to(DEVICE) for x in (q, k, v))
    n = B if n is None else n
    initial = LinearState(draw(n, H_kv, K, V), draw(n, H_kv, K).abs()) if state else None
    if initial is not None:
        initial = LinearState(*(x.float().to(DEVICE) for x in initial))
    return {"q": q, "k": k, "v": v, "initial": initial}


def seeds_of(q: Tensor, v: Tensor, n: int, H_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    K, V = q.shape[3], v.shape[3]
    shapes = (*q.shape[:3], V), (n, H_kv, K, V), (n, H_kv, K)
    do, d_kv, d_z = (torch.randn(*s, generator=g).to(DEVICE) for s in shapes)
    return do.to(v.dtype), d_kv, d_z


def evaluate(case: dict, how: str, with_state: bool, **options) -> list[Tensor]:
    """Output and state, and the gradients of all inputs through both; ``how`` is kernel, plain or exact."""
    kind = torch.float64 if how == "exact" else None
    leaves = [case[name].detach().to(kind or case[name].dtype) for name in "qkv"]
    start = case["initial"]
    if start is not None:
        leaves += [x.detach().to(kind or x.dtype) for x in start]
    # Strided inputs stay strided: requires_grad_ on detached views.
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v, *rest = leaves
    start = LinearState(*rest) if rest else None
    if how == "kernel":
        output, state = attend_all(
            q, k, v, initial=start, out_dtype=v.dtype, need_state=with_state, eps=1e-6, **options
        )
    else:
        # The plain way to do it in linear time too: its sums cancel where those of the kernels do.
        impl = "reference" if how == "exact" else "chunked"
        output, state = linear_attention_with_state(q, k, v, initial_state=start, impl=impl, validate=False, **options)
    cu = options.get("cu_seqlens")
    n = q.shape[0] if cu is None else len(cu) - 1
    outputs = [output, *state] if with_state else [output]
    seeds = seeds_of(q, v, n, k.shape[1])[: len(outputs)]
    seeds = [s.to(o.dtype) for s, o in zip(seeds, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
    return [x.detach() for x in (*outputs, *grads)]


def check(case: dict, with_state: bool = False, normalizer: str | None = "sum", **options) -> None:
    found, plain, exact = (
        evaluate(case, how, with_state, normalizer=normalizer, **options) for how in ("kernel", "plain", "exact")
    )
    names = [x for x in NAMES if (with_state or x not in ("kv", "k")) and (case["initial"] or "d_" not in x)]
    eps = torch.finfo(case["q"].dtype).eps
    # In fp32 both err by the order of their sums alone: neither bounds the other.
    factor = 4 if case["q"].dtype == torch.float32 else 2
    for name, x, p, e in zip(names, found, plain, exact, strict=True):
        assert x.shape == e.shape
        assert x.dtype == p.dtype
        if e.numel() == 0:
            continue
        error, allowed = (x - e).abs().max().item(), factor * ((p - e).abs().max() + eps * e.abs().max()).item()
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


@on_all_paths
@pytest.mark.parametrize("normalizer", ["sum", "abs_max_one", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_path_dtype_and_normaliser(path: str, normalizer: str | None, dtype: torch.dtype) -> None:
    case = inputs(dtype, B=1, H=1, H_kv=1, positive=normalizer == "sum")
    if normalizer == "abs_max_one":
        # A denominator of large terms that cancel to about 1 has no digits left, in any order of summing.
        case["k"] *= 0.05
    check(case, normalizer=normalizer)


@on_all_paths
def test_abs_max_one_takes_both_branches(path: str) -> None:
    case = inputs(B=1, Tk=5, positive=False)
    case["k"] *= 0.2
    den = (case["q"] @ case["k"].sum(2).unsqueeze(-1)).abs()
    assert (den < 1).any()
    assert (den > 1).any()
    check(case, normalizer="abs_max_one")


@on_all_paths
@pytest.mark.parametrize(("K", "V"), [(1, 1), (20, 12), (7, 33)])
def test_odd_widths_groups_and_unequal_lengths(path: str, K: int, V: int) -> None:
    # Normalised, a single feature cancels from every output: nothing of dq is left to be compared.
    check(inputs(B=1, H=2, H_kv=1, Tq=33, Tk=65, K=K, V=V), normalizer="sum" if K > 1 else None)


@pytest.mark.parametrize(
    ("K", "V", "path"),
    [(64, 64, "short"), (128, 64, "short"), (128, 128, "long"), (256, 200, "wide")],
    indirect=["path"],
)
def test_large_widths(K: int, V: int, path: str) -> None:
    check(inputs(torch.bfloat16, B=1, H=1, H_kv=1, Tq=66, Tk=80, K=K, V=V))


@on_all_paths
@pytest.mark.parametrize("normalizer", ["sum", None])
def test_states_with_their_gradients(path: str, normalizer: str | None) -> None:
    check(inputs(B=1, H=4, state=True), with_state=True, normalizer=normalizer)
    check(inputs(B=1, Tk=9, state=True), normalizer=normalizer)


@on_all_paths
def test_masked_keys_may_hold_nan(path: str) -> None:
    case = inputs(H=2, H_kv=1, Tq=40, Tk=90, state=True)
    mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.6
    mask[1] = False
    for name in "kv":
        case[name] = case[name].masked_fill(~mask[:, None, :, None], torch.nan)
    check(case, with_state=True, key_mask=mask)


@on_all_paths
def test_packed_sequences(path: str) -> None:
    """Sequences of one token, of none, of exactly a tile and of more."""
    cu = torch.tensor([0, 1, 1, 65, 105, 105], device=DEVICE)
    case = inputs(B=1, H=2, H_kv=1, Tq=105, Tk=105, n=5, state=True)
    check(case, with_state=True, cu_seqlens=cu)
    mask = torch.rand(1, 105, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.6
    check(case, cu_seqlens=cu.int(), key_mask=mask)


@on_all_paths
@pytest.mark.parametrize(("Tq", "Tk"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_any_length(path: str, Tq: int, Tk: int) -> None:
    check(inputs(B=1, H=1, H_kv=1, Tq=Tq, Tk=Tk, state=True), with_state=True)
    check(inputs(B=1, H=1, H_kv=1, Tq=Tq, Tk=Tk))


@on_all_paths
def test_no_rows_at_all(path: str) -> None:
    check(inputs(B=0))


@on_all_paths
def test_strided_inputs_and_broadcast_gradients(path: str) -> None:
    """Views of a packed projection (B, T, 3, H, D), and one whose features are not contiguous."""
    B, T, H, D = 1, 70, 2, 16
    case = inputs()
    packed = torch.randn(B, T, 3, H, D, generator=torch.Generator().manual_seed(2)).abs().to(DEVICE)
    case["q"], case["k"], case["v"] = (x.transpose(1, 2) for x in packed.unbind(2))
    check(case)
    case["k"] = case["k"].transpose(2, 3).contiguous().transpose(2, 3)
    check(case)
    leaves = [case[name].detach().requires_grad_() for name in "qkv"]
    output, _ = attend_all(*leaves, normalizer="sum", eps=1e-6, out_dtype=torch.float32)
    exact = linear_attention_with_state(*leaves, impl="reference").output
    for x, e in zip(torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(exact.sum(), leaves), strict=True):
        torch.testing.assert_close(x, e, atol=1e-5, rtol=1e-4)


@on_all_paths
def test_half_precision_sums_may_exceed_its_range(path: str) -> None:
    case = inputs(torch.float16, B=1, H=1, H_kv=1)
    for name in "kv":
        case[name] = case[name] * 100
    assert (case["k"].double().transpose(2, 3) @ case["v"].double()).abs().max() > 65504
    check(case)


@on_all_paths
def test_a_common_offset_of_the_values_keeps_the_gradient_of_the_queries(path: str) -> None:
    """dq is a difference of terms as large as the mean of v: rounding the state to bf16 would drown it."""
    case = inputs(torch.bfloat16, B=1, Tk=128)
    case["v"] = (0.5 * case["v"].float() + 2).bfloat16()
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_output_dtype_may_differ(dtype: torch.dtype) -> None:
    case = inputs(torch.bfloat16 if dtype == torch.float32 else torch.float32, B=1)
    leaves = [case[name].requires_grad_() for name in "qkv"]
    output, state = attend_all(*leaves, normalizer="sum", eps=1e-6, out_dtype=dtype)
    exact = linear_attention_with_state(*(x.double() for x in leaves), impl="reference").output
    assert output.dtype == dtype
    assert state is None
    assert (output - exact).abs().max() < 0.02 * exact.abs().max()
    for x, e in zip(torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert x.dtype == e.dtype
        assert (x.double() - e.double()).abs().max() < 0.02 * e.double().abs().max()


@on_all_paths
def test_memory_is_written_before_it_is_read_and_runs_repeat(path: str) -> None:
    case = inputs(torch.bfloat16, B=1, Tk=130, K=20, V=12, state=True)
    first = evaluate(case, "kernel", True, normalizer="sum")
    with poisoned_allocations():
        second = evaluate(case, "kernel", True, normalizer="sum")
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["short", "long"], indirect=True)
def test_operator_is_registered_properly(path: str) -> None:
    case = inputs(B=1, Tq=10, Tk=10, state=True)
    start = torch.cat([case["initial"].kv.flatten(2), case["initial"].k], -1).requires_grad_()
    leaves = [case[name].requires_grad_() for name in "qkv"]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    maps = *[None] * 6, -1, -1, 1, 1
    options = 1, 1e-6, torch.float32
    torch.library.opcheck(bidirectional, (*leaves, None, None, start, *options, True, *maps), test_utils=tests)
    torch.library.opcheck(bidirectional, (*leaves, None, None, None, *options, False, *maps), test_utils=tests[:3])


def test_the_gradient_of_a_state_that_was_not_stored_is_not_read() -> None:
    """A caller that sums all outputs hands over an empty gradient with it, which lies nowhere."""
    leaves = [inputs(B=1, Tq=10, Tk=10)[name].requires_grad_() for name in "qkv"]
    options = None, None, None, 1, 1e-6, torch.float32, False, *[None] * 6, -1, -1, 1, 1
    output, state = bidirectional(*leaves, *options)
    assert state.numel() == 0
    with_state = torch.autograd.grad([output.sum(), state.sum()], leaves)
    output, _ = bidirectional(*leaves, *options)
    assert all(torch.equal(a, b) for a, b in zip(with_state, torch.autograd.grad(output.sum(), leaves), strict=True))


def test_compiles_into_one_graph() -> None:
    case = inputs(B=1, Tq=20, Tk=20)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_all(q.relu(), k.relu(), v, normalizer="sum", eps=1e-6, out_dtype=v.dtype)[0]

    leaves = [case[name].requires_grad_() for name in "qkv"]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    eager = call(*leaves)
    assert torch.equal(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["long"], indirect=True)
def test_half_precision_keeps_the_gradient_of_the_queries_over_many_tokens(path: str) -> None:
    """dq is what is left when terms as large as the mean of v cancel: an 11-bit state would drown it."""
    case = inputs(torch.float16, B=1, H=1, H_kv=1, Tk=600)
    case["v"] = case["v"] + 4
    check(case)


@on_all_paths
def test_fp32_states_lose_nothing_over_many_tokens(path: str) -> None:
    case = inputs(B=1, H=1, H_kv=1, Tq=5, Tk=500)
    found, exact = (evaluate(case, how, True, normalizer="sum") for how in ("kernel", "exact"))
    for x, e in zip(found[1:3], exact[1:3], strict=True):
        assert (x - e).abs().max() <= 3 * torch.finfo(torch.float32).eps * e.abs().max()


CONFIGS = [Config(16, 4, 1), Config(32, 4, 2, split=False), Config(64, 8, 3, registers=168, programs=2)]


@on_all_paths
@pytest.mark.parametrize("settings", CONFIGS)
def test_every_config_computes_the_same(settings: Config, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "short_config", lambda x, backward=False: settings)
    monkeypatch.setattr(launch, "long_config", lambda x, kernel: settings)
    check(inputs(B=1, H=2, H_kv=1, Tq=40, Tk=130, state=True), with_state=True)


@pytest.mark.parametrize(("rows", "tiles"), [(128, 49), (96, 256), (12, 1094), (1, 5000), (500, 60), (2000, 20)])
@pytest.mark.parametrize("programs", [3, 4])
def test_segments_give_all_multiprocessors_the_same(rows: int, tiles: int, programs: int) -> None:
    processors = 132
    segments = config._segments(rows, tiles, max(1, tiles // 8), programs, processors)
    most = -(-rows * segments // processors) * -(-tiles // segments)
    # One program more than the others have, or tiles that are no multiple: at most a tenth where there is a choice.
    assert most <= 1.1 * rows * tiles / processors + (tiles if rows >= processors else 0)
    assert segments == 1 or rows * segments <= programs * processors


def test_the_direct_way_is_the_operator() -> None:
    """Eager calls go past the dispatcher; where a mode watches, the operator is called."""
    case = inputs(B=1, Tq=20, Tk=20)
    leaves = [case[name].requires_grad_() for name in "qkv"]
    options = {"normalizer": "sum", "eps": 1e-6, "out_dtype": torch.float32}
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    direct, _ = attend_all(*leaves, **options)
    grads = torch.autograd.grad(direct.sum(), leaves)
    with Watch():
        watched, _ = attend_all(*leaves, **options)
        again = torch.autograd.grad(watched.sum(), leaves)
    assert torch.equal(direct, watched)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert {"linattn.bidirectional.default", "linattn.bidirectional_backward.default"} <= set(seen)
    with torch.no_grad():
        assert torch.equal(attend_all(*leaves, **options)[0], direct)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow for these shapes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("B", "H", "H_kv", "T", "K", "V"),
    [(8, 6, 6, 196, 64, 64), (2, 4, 2, 1000, 128, 128), (1, 2, 2, 2000, 64, 64), (1, 2, 1, 700, 256, 256),
     (2, 2, 2, 300, 128, 64), (1, 2, 2, 600, 100, 36), (1, 1, 1, 600, 32, 256)],
)  # fmt: skip
def test_large_shapes(dtype: torch.dtype, B: int, H: int, H_kv: int, T: int, K: int, V: int) -> None:
    check(inputs(dtype, B, H, H_kv, T, T, K, V, state=True), with_state=True)
    check(inputs(dtype, B, H, H_kv, T, T, K, V))
