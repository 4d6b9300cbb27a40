"""The bidirectional kernels against the fp64 specification: values and gradients, on every path, with every option."""

import pytest
import torch

from kernels.bidirectional_case import check, evaluate, inputs, on_all_paths, take_path
from kernels.device import DEVICE
from linattn import linear_attention_with_state
from linattn.kernels.bidirectional.attend import attend_all
from linattn.testing.poison import poisoned_allocations


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_path(request.param, monkeypatch)
    return request.param


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
