"""Reflections by kernels: which calls they serve, and how they are called."""

from torch import Tensor

from linattn.kernels.common.support import reason_against
from linattn.kernels.reflection.library import WIDEST, reflect_directly
from linattn.kernels.reflection.pairs_library import pair_table_directly
from linattn.ops.reflection.types import Modulation, Reflected
from linattn.ops.shared.call import compute_dtype

MOST_REFLECTIONS = 2


def against_heads(q: Tensor, k: Tensor, normals: Tensor | None, variance: bool, wide: bool) -> str:
    """Why no kernel serves ``reflect_heads``, in words; empty if one does."""
    if not min(*q.shape, k.shape[1], k.shape[2]):
        return "an empty input needs none"
    if q.shape[1] * q.shape[3] > WIDEST:
        return f"they take up to {WIDEST} channels of all heads, got {q.shape[1] * q.shape[3]}"
    if normals is not None and normals.shape[0] > MOST_REFLECTIONS:
        return f"they take up to {MOST_REFLECTIONS} reflections, got {normals.shape[0]}"
    return reason_against(q, k)


def against_pairs(angles: Tensor, variance: Tensor | None, *modulation: Tensor) -> str:
    """Why no kernel serves ``pair_matrices``, in words; empty if one does."""
    if not min(*angles.shape, 1 if variance is None else variance.shape[0]):
        return "an empty input needs none"
    if angles.shape[0] > MOST_REFLECTIONS:
        return f"they take up to {MOST_REFLECTIONS} reflections, got {angles.shape[0]}"
    return reason_against(angles, *(() if variance is None else (variance,)), *modulation)


def reflect_heads(
    q: Tensor, k: Tensor, normals: Tensor | None, variance: bool, key_mask: Tensor | None, wide: bool
) -> Reflected:
    """Reflect q and k, in any memory order, which y has too (``like_tokens``); differentiable in q, k and normals."""
    dtype = compute_dtype(q, k)
    if normals is None and not variance:
        return Reflected(q.to(dtype), k.to(dtype), None) if wide else Reflected(q, k, None)
    rows = q.new_empty((0, q.shape[1] * q.shape[3]), dtype=dtype) if normals is None else normals.flatten(1)
    yq, yk, variances, _, _ = reflect_directly(q, k, rows, key_mask, variance, wide)
    if normals is None:
        yq, yk = (q.to(dtype), k.to(dtype)) if wide else (q, k)
    return Reflected(yq, yk, variances.unsqueeze(2) if variance else None)


def pair_matrices(angles: Tensor, variance: Tensor | None, modulation: Modulation | None) -> tuple[Tensor, Tensor]:
    """The matrices of pairs of channels, differentiable in all arguments."""
    if variance is None or modulation is None:
        table = pair_table_directly(None, angles, None, None, None)
    else:
        table = pair_table_directly(variance.squeeze(2), angles, *modulation)
    first, second = table.unbind(2)  # gradients of unbind are stacked; those of two slices would be padded and added
    return first, second
