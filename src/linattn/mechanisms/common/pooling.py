"""Means of tokens over a few bins of each sequence or image, and products with what was pooled."""

import torch
from torch import Tensor

from linattn.mechanisms.base import Call
from linattn.mechanisms.common.positions import token_positions
from linattn.ops.linear.api import linear_attention_with_state
from linattn.ops.shared.call import hide, num_sequences
from linattn.ops.shared.checks import check_values
from linattn.ops.shared.packing import sequence_of_tokens
from linattn.ops.shared.types import LinearState


def line_bins(x: Tensor, bins: int, mask: Tensor | None, call: Call) -> Tensor:
    """Membership ``(B, T, bins)`` bool of the tokens of ``x (B, H, T, D)`` in bins over its sequence's real tokens."""
    T = x.shape[2]
    start = torch.zeros(num_sequences(x, call.cu_seqlens), dtype=torch.long, device=x.device)
    positions, lengths = token_positions(T, mask, call.cu_seqlens, start)
    own = lengths[:, None] if call.cu_seqlens is None else lengths[sequence_of_tokens(call.cu_seqlens, T)][None]
    return _in_bins(positions, own, bins)


def plane_bins(x: Tensor, side: int, call: Call) -> Tensor:
    """Membership ``(B, T, side^2)`` bool in ``side x side`` bins of the plane ``call.spatial_shape``, row by row."""
    shape, T, n = call.spatial_shape, x.shape[2], num_sequences(x, call.cu_seqlens)
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(s, int) and s >= 1 for s in shape):
        raise ValueError(f"spatial_shape must be a pair of integers >= 1 (rows, columns), got {shape!r}")
    rows, columns = shape
    images = 1 if call.cu_seqlens is None else n
    fits = images * rows * columns == T
    if fits and call.cu_seqlens is not None and check_values(x, None):
        fits = bool((call.cu_seqlens.diff() == rows * columns).all())
    if not fits:
        raise ValueError(f"spatial_shape {shape} must hold all tokens of a sequence, got T = {T} in {images} of them")
    # Positions count padding too, since it has its place in the plane.
    start = torch.zeros(n, dtype=torch.long, device=x.device)
    positions, _ = token_positions(T, None, call.cu_seqlens, start)
    row, column = positions // columns, positions % columns
    vertical = _in_bins(row, torch.full_like(row, rows), side)
    horizontal = _in_bins(column, torch.full_like(column, columns), side)
    return (vertical.unsqueeze(-1) & horizontal.unsqueeze(-2)).flatten(-2)


def pool(x: Tensor, members: Tensor, mask: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Means of ``x (B, H, T, D)`` over bins, given the tokens' membership ``(B, T, F)``.

    Returns the means ``(N, H, F, D)``, and for each token whether its sequence has any token in a bin,
    ``(B, 1 or H, 1 or T, F)``.
    """
    features = hide(members.to(x.dtype).unsqueeze(1), mask)
    if call.cu_seqlens is None:
        counts = features.sum(2).unsqueeze(-1)  # (B, 1, F, 1)
        return features.mT @ x / counts.clamp(min=1), (counts > 0).mT
    features = features.expand(-1, x.shape[1], -1, -1)
    state = linear_attention_with_state(
        features, features, x, normalizer=None, cu_seqlens=call.cu_seqlens, impl=call.impl
    ).state
    own = sequence_of_tokens(call.cu_seqlens, x.shape[2])
    return state.kv / state.k.clamp(min=1).unsqueeze(-1), (state.k > 0).transpose(0, 1)[:, own].unsqueeze(0)


def read(x: Tensor, memory: Tensor, call: Call) -> Tensor:
    """``x (B, H, T, D)`` times the matrix of its sequence, ``memory (N, H, D, F)``: ``(B, H, T, F)``."""
    if call.cu_seqlens is None:
        return x @ memory
    # As a linear attention with keys of 0, which only reads the state it starts from.
    nothing = x.new_zeros(*x.shape[:3], memory.shape[3])
    start = LinearState(memory, memory.new_zeros(memory.shape[:3]))
    return linear_attention_with_state(
        x, torch.zeros_like(x), nothing, normalizer=None, cu_seqlens=call.cu_seqlens, impl=call.impl,
        initial_state=start,
    ).output  # fmt: skip


def _in_bins(position: Tensor, length: Tensor, bins: int) -> Tensor:
    """Bin b of adaptive pooling holds the positions from ``floor(b L / bins)`` to below ``ceil((b + 1) L / bins)``."""
    b = torch.arange(bins, device=position.device)
    position, length = position.unsqueeze(-1), length.unsqueeze(-1)
    return (position >= b * length // bins) & (position < ((b + 1) * length + bins - 1) // bins)
