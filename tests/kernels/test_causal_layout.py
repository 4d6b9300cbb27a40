"""Results of causal kernels lie in memory as what they belong to, and are the same numbers in every order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.causal_case import segments
from kernels.device import DEVICE
from linattn import exponential_attention, linear_attention, linear_attention_with_state
from linattn.kernels.causal.library import triton_causal, triton_causal_backward
from linattn.kernels.common import layout
from linattn.kernels.exponential.library import triton_exponential, triton_exponential_backward

B, T = 2, 70
Run = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def drawn(H: int, H_kv: int, K: int, V: int, dtype: torch.dtype, batch: int = B) -> list[Tensor]:
    """q, k, v, a log decay, and the output's gradient; all contiguous."""
    generator = torch.Generator().manual_seed(3)
    shapes = (batch, H, T, K), (batch, H_kv, T, K), (batch, H_kv, T, V), (batch, H_kv, T), (batch, H, T, V)
    found = [torch.rand(shape, generator=generator) for shape in shapes]
    found[3] = -0.2 * found[3]
    return [(x if x.ndim == 3 else x.to(dtype)).to(DEVICE) for x in found]


def token_major(x: Tensor) -> Tensor:
    """The same numbers, with the heads of a token side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def lies_as(x: Tensor, tokens: bool) -> bool:
    return (x.transpose(1, 2) if tokens else x).is_contiguous()


def outcome(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and gradients of q, k, v and the decay."""
    *leaves, d_out = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out = run(*leaves)
    out, *rest = out if isinstance(out, tuple) else (out,)
    return [out, *torch.autograd.grad(out, leaves, d_out, allow_unused=True), *rest]


def causal(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    return linear_attention(q, k, v, causal=True, log_decay=a, normalizer="sum", impl="triton")


def with_state(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = linear_attention_with_state(q, k, v, causal=True, log_decay=a, normalizer=None, impl="triton")
    return found.output, found.state.kv, found.state.k


def packed(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    cuts = torch.tensor([0, 3, 3, 45, T], device=q.device)
    return linear_attention(q, k, v, causal=True, log_decay=a, cu_seqlens=cuts, normalizer="abs_max_one", impl="triton")


def both_ways(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    return linear_attention(q, k, v, causal=False, log_decay=a, normalizer="sum", impl="triton")


def exponential(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    return exponential_attention(q, k, v, log_input=a, log_decay=a, impl="triton")


@pytest.mark.parametrize(
    ("run", "H_kv", "widths", "dtype", "pieces"),
    [
        (causal, 2, (16, 32), torch.float32, 2),
        (causal, 1, (16, 20), torch.bfloat16, 1),  # a group of heads, and a width that is padded
        (with_state, 2, (16, 16), torch.bfloat16, 1),
        (packed, 1, (16, 16), torch.float32, 1),
        (both_ways, 2, (16, 16), torch.bfloat16, 2),  # its own kernel
        (both_ways, 1, (24, 16), torch.float16, 1),  # two sweeps, with a sum in fp32 between them
        (exponential, 2, (16, 32), torch.bfloat16, 1),
        (exponential, 1, (20, 16), torch.float16, 1),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_results_lie_as_what_they_belong_to(
    run: Run, H_kv: int, widths: tuple[int, int], dtype: torch.dtype, pieces: int
) -> None:
    inputs = drawn(2, H_kv, *widths, dtype, 1 if run is packed else B)
    with segments(pieces):
        expected = outcome(run, inputs)
        # Each for itself: some come from a projection, others were made contiguous by something before.
        for orders in ((True, True, True), (False, True, False)):
            turned = [token_major(x) if yes else x for x, yes in zip(inputs, orders, strict=False)]
            found = outcome(run, [*turned, *inputs[3:]])
            for x, yes in zip(found[:4], (orders[0], *orders), strict=True):
                assert lies_as(x, yes and x.shape[1] > 1), (orders, x.shape, x.stride())
            for x, other in zip(found, expected, strict=True):
                if x is not None:  # on a GPU another order is another kernel
                    assert torch.equal(x, other) if DEVICE == "cpu" else torch.allclose(x, other, 2e-2, 2e-2)
    assert all(lies_as(x, False) for x in expected[:4])


def test_new_memory_lies_as_tokens_do() -> None:
    x = torch.empty(2, 5, 3, 4).transpose(1, 2)  # (2, 3, 5, 4)
    assert layout.like_tokens(x, 7, torch.bfloat16).stride() == (105, 7, 21, 1)
    assert layout.like_tokens(x, 7, torch.bfloat16, heads=6).stride() == (210, 7, 42, 1)
    assert layout.like_tokens(x.contiguous(), 7, torch.bfloat16).stride() == (105, 35, 7, 1)
    one = torch.empty(3, 2, 5, 3, 4)[0].transpose(1, 2)  # a part of one projection for all three
    assert layout.like_tokens(one, 4, torch.float32).transpose(1, 2).is_contiguous()
    assert layout.side_by_side(x) == 3
    assert layout.side_by_side(x.contiguous()) == layout.side_by_side(torch.empty(2, 5, 1, 4).transpose(1, 2)) == 1


def test_fakes_lie_as_results_do() -> None:
    q, k, v, a, d_out = drawn(2, 1, 16, 16, torch.float32, 1)
    q, v = token_major(q), token_major(v)
    tests = ("test_schema", "test_faketensor")
    args = (q, k, v, None, None, a, None, None, False, 1, 1e-6, torch.float32, False, False)
    torch.library.opcheck(triton_causal, args, test_utils=tests)
    out, den, *_ = triton_causal(*args)
    more = (out, den, False, 1, 1e-6, False, True)
    torch.library.opcheck(triton_causal_backward, (d_out, None, None, *args[:8], *more), test_utils=tests)
    args = (q, k, v, a, a, None, None, None, None, 0.25, torch.float32, False)
    torch.library.opcheck(triton_exponential, args, test_utils=tests)
    out, _, _, _, *kept = triton_exponential(*args)
    more = (d_out, None, None, *args[:7], None, out, *kept, True)
    torch.library.opcheck(triton_exponential_backward, more, test_utils=tests)
