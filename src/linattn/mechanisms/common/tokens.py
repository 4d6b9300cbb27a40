"""Over the real tokens of each sequence: sums, maxima, softmaxes, positions, planes, and the eps added to a mean.

A sum over tokens is a linear attention whose features are all 1, so the algebra takes care of masks, packed sequences
and (causal) running sums.
"""

import torch
from torch import Tensor

from linattn.mechanisms.base import Call
from linattn.ops.linear.api import run
from linattn.ops.linear.call import LinearCall
from linattn.ops.maps import Scaled, WideMap
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import compute_dtype, without_autocast
from linattn.ops.shared.packing import sequence_of_tokens
from linattn.ops.shared.types import LinearState

MEAN_EPS = 1e-6


def sum_over_tokens(x: Tensor, call: Call, *, causal: bool = False, initial: Tensor | None = None) -> Tensor:
    """Sum of ``x (B, H, T, F)`` over the real tokens of each token's own sequence, in x's dtype.

    ``(B, H, 1, F)`` where all tokens share one sum, else ``(B, H, T, F)``. Causal: the sum up to each token, added to
    ``initial (N, H, F)``.
    """
    ones = x.new_ones(*x.shape[:3], 1)
    queries = ones if causal or call.cu_seqlens is not None else x.new_ones(*x.shape[:2], 1, 1)
    state = None
    if initial is not None:
        state = LinearState(initial.unsqueeze(2), initial.new_zeros(*initial.shape[:2], 1))
    with without_autocast(x):
        # need_state when causal: a call with one token then counts as a step of decoding.
        asked = LinearCall(
            queries, ones, x, causal=causal, normalizer=None, key_mask=call.key_mask, cu_seqlens=call.cu_seqlens,
            initial_state=state, need_state=causal,
        )  # fmt: skip
        return run(asked, call.impl).output


def count_tokens(length: int, call: Call, like: Tensor) -> Tensor:
    """Real tokens in a token's own sequence, at least 1: ``(B or 1, 1, 1 or T, 1)`` in the dtype of ``like``."""
    if call.cu_seqlens is None:
        if call.key_mask is None:
            return like.new_full((1, 1, 1, 1), max(length, 1))
        return call.key_mask.sum(1).clamp(min=1).to(like.dtype)[:, None, None, None]
    bounds = call.cu_seqlens.long()
    if call.key_mask is not None:
        bounds = torch.cat([bounds.new_zeros(1), call.key_mask[0].cumsum(0)])[bounds]
    own = sequence_of_tokens(call.cu_seqlens, length)
    return bounds.diff()[own].clamp(min=1).to(like.dtype)[None, None, :, None]


def max_over_tokens(x: Tensor, call: Call) -> Tensor:
    """Largest ``x (B, H, T, F)`` of a token's sequence, ``(B, H, 1 or T, F)``, without gradient; 0 if all are -inf."""
    B, H, T, F = x.shape
    x = x.detach()
    if call.cu_seqlens is None:
        largest = x.amax(2, keepdim=True) if T else x.new_zeros(B, H, 1, F)
    else:
        own = sequence_of_tokens(call.cu_seqlens, T)
        largest = x.new_full((B, H, call.cu_seqlens.shape[0] - 1, F), -torch.inf)
        largest = largest.scatter_reduce(2, own[:, None].expand(B, H, T, F), x, "amax")[:, :, own]
    return largest.masked_fill(largest == -torch.inf, 0)


def hide_logits(x: Tensor, call: Call) -> Tensor:
    """``x (B, H, T, F)`` with -inf at padding: its exponential could be infinite, and 0 times infinity is NaN."""
    return x if call.key_mask is None else x.masked_fill(~call.key_mask[:, None, :, None], -torch.inf)


def exp_over_tokens(x: Tensor, call: Call) -> Tensor:
    """``exp(x - max)`` of ``x (B, H, T, F)`` with the maximum over the real tokens of the sequence; 0 for padding."""
    x = hide_logits(x, call)
    return (x - max_over_tokens(x, call)).exp()


def softmax_features(logits_q: Tensor, logits_k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Features whose weights are ``sum_f softmax_f(logits_q) softmax_s(logits_k)_f``, for ``normalizer="sum"``.

    ``logits_q (B, H, T, F)``, ``logits_k (B, H_kv, T, F)``; the features lie in [0, 1] and the row sums are at
    least 1. The denominators Z_f of the keys are moved to the queries, and the division by the row sum removes common
    factors of a query. So no feature needs to be as small as 1/T, which half precision could not hold.
    """
    psi = exp_over_tokens(logits_k, call)
    z = sum_over_tokens(psi, call)
    log_z = z.masked_fill(z == 0, 1).log().repeat_interleave(logits_q.shape[1] // z.shape[1], dim=1)
    logits = logits_q - log_z
    largest = logits.detach().amax(-1, keepdim=True)
    return (logits - largest.masked_fill(largest == -torch.inf, 0)).exp(), psi


def mean_factor(q: Tensor, k: Tensor, call: Call, *, causal: bool) -> tuple[Tensor | None, float]:
    """A factor on the query features, ``(1 or B, 1, Tq)`` in fp32 or fp64 (None: 1), and an eps.

    Together they add 1e-6 to the *mean* over the keys, and when causal to the sum. The algebra takes one eps for all
    rows, here 1e-6 times the number of keys. A query that sees only N real ones needs 1e-6 N. If it is scaled by
    ``length / N``, this eps has the same effect, since the scale cancels everywhere else.
    """
    if causal:
        return None, MEAN_EPS
    length = k.shape[2]
    eps = MEAN_EPS * max(length, 1)
    if call.key_mask is None and call.cu_seqlens is None:
        return None, eps
    if call.cu_seqlens is not None:
        checks.check_size("q", "length", q.shape[2], length, "k")
    factor = length / count_tokens(length, call, q.new_empty((), dtype=compute_dtype(q)))
    return factor.squeeze(-1).expand(-1, -1, q.shape[2]), eps


def mean_eps(phi: Tensor, k: Tensor, call: Call, *, causal: bool = False) -> tuple[Tensor, float]:
    """The query features with the factor of :func:`mean_factor`, and the eps."""
    factor, eps = mean_factor(phi, k, call, causal=causal)
    return (phi if factor is None else phi * factor.to(phi.dtype).unsqueeze(-1)), eps


def with_mean_eps(map_q: WideMap, q: Tensor, k: Tensor, call: Call, *, causal: bool) -> tuple[WideMap, float]:
    """:func:`mean_eps` for a feature map that the algebra is to apply to the queries ``(B, H, Tq, D)``."""
    factor, eps = mean_factor(q, k, call, causal=causal)
    return (map_q if factor is None else Scaled(map_q, factor)), eps


def query_mask(q: Tensor, k: Tensor, call: Call) -> Tensor | None:
    """Mask of the real queries: that of the keys in self-attention; None (all are real) if the lengths differ."""
    if call.cu_seqlens is not None:
        checks.check_size("q", "length", q.shape[2], k.shape[2], "k")
    return call.key_mask if q.shape[2] == k.shape[2] else None


def token_positions(
    length: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start: Tensor,
) -> tuple[Tensor, Tensor]:
    """Positions ``(B or 1, T)`` counted from ``start (N,)``, and the ``start`` for the tokens that come next.

    A padded token has the position of the next real one.
    """
    if key_mask is None and cu_seqlens is None:
        return start.unsqueeze(1) + torch.arange(length, device=start.device), start + length
    real = torch.ones(1, length, dtype=torch.long, device=start.device) if key_mask is None else key_mask.long()
    count = real.cumsum(1)  # real tokens up to and including each token, over the whole row
    before = count - real
    if cu_seqlens is None:
        total = count[:, -1] if length else torch.zeros_like(start)
        return start.unsqueeze(1) + before, start + total
    counted = torch.cat([count.new_zeros(1), count[0]])[cu_seqlens.long()]  # (N+1,) before each sequence
    own = sequence_of_tokens(cu_seqlens, length)
    return (before[0] + (start - counted[:-1])[own]).unsqueeze(0), start + counted.diff()


def plane_of(x: Tensor, call: Call, num_prefix_tokens: int = 0) -> tuple[int, int, int]:
    """Rows and columns of ``call.spatial_shape``, and the number of such planes that the tokens ``(B, H, T, D)`` are.

    Each packed sequence is a plane, with its prefix tokens before it.
    """
    shape, T = call.spatial_shape, x.shape[2]
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(s, int) and s >= 1 for s in shape):
        raise ValueError(f"spatial_shape must be a pair of integers >= 1 (rows, columns), got {shape!r}")
    rows, columns = shape
    tokens = num_prefix_tokens + rows * columns
    images = 1 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    fits = images * tokens == T
    if fits and call.cu_seqlens is not None and checks.check_values(x, None):
        fits = bool((call.cu_seqlens.diff() == tokens).all())
    if not fits:
        before = f" after {num_prefix_tokens} prefix tokens" if num_prefix_tokens else ""
        raise ValueError(f"spatial_shape {shape} must hold all tokens of a sequence{before}, got T = {T} in {images}")
    return rows, columns, images
