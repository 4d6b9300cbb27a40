"""Reflections of queries and keys before a feature map: across heads, and in pairs of channels."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linattn.kernels.reflection import apply as kernels
from linattn.ops.reflection.types import EPS, SMALLEST_SQUARE, Modulation, Reflected
from linattn.ops.shared.call import check_same, check_shape, check_size, check_tensor, choose, compute_dtype, hide


def reflect_heads(
    q: Tensor,
    k: Tensor,
    normals: Tensor | None,
    *,
    variance: bool = False,
    key_mask: Tensor | None = None,
    wide: bool = False,
    impl: str = "auto",
) -> Reflected:
    """Householder reflections over the channels of all heads, and the variances over tokens of the reflected vectors.

    ``y = x - 2 (x.w) w / |w|^2`` for x in (q, k) and each normal w in turn;
    ``var = mean over a pair of channels of mean_t (y_t - mean_t y_t)^2``.

    Args:
        q: ``(B, H, Tq, D)``.
        k: ``(B, H_kv, Tk, D)``; a key head and the query heads that share it are one sample of the variance.
        normals: ``(R, H, 1, D)``, which needs ``H_kv = H``; None: q and k are returned as they are.
        variance: whether to return the variances; D must be even then.
        key_mask: ``(B, Tk)`` bool, True = real token. The variances leave out masked tokens, also among the queries if
            these are as many as the keys.
        wide: whether to return y in fp32 (fp64 for fp64) instead of rounding it to the dtypes of q and k.
        impl: ``"triton"``, or a form in plain PyTorch, all of which are the same here; for ``"auto"`` see
            :func:`explain`.

    Returns:
        y of q and of k, and the variances ``(B, H_kv, 1, D/2)`` in fp32 or fp64, or None.

    Example:
        >>> import torch
        >>> from linattn.ops.reflection.api import reflect_heads
        >>> x, w = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), torch.tensor([3.0, 0.0]).view(1, 1, 1, 2)
        >>> reflect_heads(x, x, w).q.flatten().tolist()
        [-1.0, 2.0]
    """
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x, "(B, H, T, D)", 4)
    check_same("q", q, k=k)
    check_size("k", "batch size", k.shape[0], q.shape[0], "q")
    check_size("k", "head dimension", k.shape[3], q.shape[3], "q")
    if normals is not None:
        check_size("k", "number of heads", k.shape[1], q.shape[1], "q")
        check_tensor("normals", normals, "(R, H, 1, D)", 4)
        check_shape("normals", normals, (normals.shape[0], q.shape[1], 1, q.shape[3]))
    if choose(impl, q, lambda: kernels.against_heads(q, k, normals, variance, wide)).impl == "triton":
        return kernels.reflect_heads(q, k, normals, variance, key_mask, wide)
    dtype = compute_dtype(q, k)
    yq, yk = q.to(dtype), k.to(dtype)
    for w in () if normals is None else normals.to(dtype).unbind():
        yq, yk = reflect_across_heads(yq, w), reflect_across_heads(yk, w)
    over_rows = variance_over_rows(yq, yk, key_mask) if variance else None
    return Reflected(yq, yk, over_rows) if wide else Reflected(yq.to(q.dtype), yk.to(k.dtype), over_rows)


def pair_matrices(
    angles: Tensor, variance: Tensor | None = None, modulation: Modulation | None = None, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The 2 x 2 matrices of reflections along ``(cos a, sin a)`` in pairs of channels, as factors of two channels.

    The reflected channel is the first result times the channel itself plus the second times the other channel of its
    pair; both are ``(1 or B, H_kv, D)``. ``angles (R, H_kv, D/2)`` are those of R >= 1 reflections one after the other.
    If ``variance (B, H_kv, 1, D/2)`` is given with a modulation, the last angle is increased by
    ``pi/2 tanh(amplitude) tanh(gain log(var + 1e-6) + bias)``.

    Example:
        >>> import torch
        >>> from linattn.ops.reflection.api import pair_matrices
        >>> own, other = pair_matrices(torch.zeros(1, 1, 1))  # the first channel changes its sign
        >>> own.flatten().tolist(), other.abs().flatten().tolist()
        ([-1.0, 1.0], [0.0, 0.0])
    """
    given = () if modulation is None or variance is None else modulation
    if choose(impl, angles, lambda: kernels.against_pairs(angles, variance, *given)).impl == "triton":
        return kernels.pair_matrices(angles, variance, modulation)
    each = modulated_angles(angles, variance, modulation)
    one, zero = torch.ones_like(each[0]), torch.zeros_like(each[0])
    aa, ab, ba, bb = one, zero, zero, one  # the matrix by rows: the first channel from a and b, the second from a and b
    for angle in each:
        cos, sin = (2 * angle).cos(), (2 * angle).sin()
        aa, ab, ba, bb = -(cos * aa + sin * ba), -(cos * ab + sin * bb), cos * ba - sin * aa, cos * bb - sin * ab
    own, other = (torch.stack(pair, dim=-1).flatten(-2).squeeze(-2) for pair in ((aa, bb), (ab, ba)))
    return (own, other) if own.ndim == 3 else (own.unsqueeze(0), other.unsqueeze(0))


def reflect_across_heads(x: Tensor, w: Tensor) -> Tensor:
    """``x - 2 (x.w) w / |w|^2`` over the channels of all heads: x ``(B, H, T, D)``, w ``(H, 1, D)``."""
    return x - (x * w).sum((1, 3), keepdim=True) * (2 * w / w.square().sum().clamp(min=SMALLEST_SQUARE))


def variance_over_rows(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """``pooled_variance`` over the real tokens of each row; if lengths of q and k differ, all queries are real."""
    mask = key_mask if q.shape[2] == k.shape[2] else None
    q, k = hide(q, mask), hide(k, key_mask)

    def count(x: Tensor, mask: Tensor | None) -> Tensor | int:
        return max(x.shape[2], 1) if mask is None else mask.sum(1).clamp(min=1).to(x.dtype)[:, None, None, None]

    number = count(k, key_mask) + q.shape[1] // k.shape[1] * count(q, mask)

    def mean(q: Tensor, k: Tensor) -> Tensor:
        queries = hide(q, mask).unflatten(1, (k.shape[1], -1)).sum((2, 3))
        return (queries + hide(k, key_mask).sum(2)).unsqueeze(2) / number

    return pooled_variance(q, k, mean)


def pooled_variance(q: Tensor, k: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Variance over tokens, averaged over the two channels of a pair: ``(B, H_kv, 1 or T, D/2)``.

    Keys and the queries that share them are one sample; ``mean(q, k)`` is its mean ``(B, H_kv, 1 or T, D)``.
    """
    center = mean(q, k)
    away = q - center.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return mean(away.square(), (k - center).square()).unflatten(-1, (-1, 2)).mean(-1)


def modulated_angles(angles: Tensor, variance: Tensor | None, modulation: Modulation | None) -> list[Tensor]:
    """The R ``angles (R, H_kv, D/2)`` as a list, ``(.., H_kv, 1 or T, D/2)`` each; the variance changes the last."""
    each = list(angles.to(compute_dtype(angles)).unsqueeze(2).unbind())
    if each and variance is not None and modulation is not None:
        amplitude, gain, bias = (p.to(variance.dtype).unsqueeze(1) for p in modulation)
        shift = math.pi / 2 * amplitude.tanh() * (gain * (variance + EPS).log() + bias).tanh()
        each[-1] = each[-1] + shift
    return each
