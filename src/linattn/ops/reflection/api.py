"""Reflections of queries and keys before a feature map: across heads, and in pairs of channels."""

from typing import Any

from torch import Tensor

from linattn.kernels.reflection import apply as triton
from linattn.ops.reflection import plain as plain
from linattn.ops.reflection.plain import Modulation, Reflected
from linattn.ops.shared.checks import check_same, check_shape, check_size, check_tensor
from linattn.ops.shared.choice import Choice, choose

__all__ = ["Modulation", "Reflected", "explain_reflection", "pair_matrices", "reflect_heads"]


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
    _check(q, k, normals)
    if _choose(q, k, normals, variance, wide, impl).impl == "triton":
        return triton.reflect_heads(q, k, normals, variance, key_mask, wide)
    return plain.reflect_heads(q, k, normals, variance, key_mask, wide)


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
    if choose(impl, angles, lambda: triton.against_pairs(angles, variance, *given)).impl == "triton":
        return triton.pair_matrices(angles, variance, modulation)
    return plain.pair_matrices(plain.turned(angles, variance, modulation))


def explain_reflection(
    q: Tensor, k: Tensor, normals: Tensor | None, *, impl: str = "auto", variance: bool = False, **options: Any
) -> Choice:
    """Which implementation ``reflect_heads(q, k, normals, **options)`` takes, and why."""
    _check(q, k, normals)
    return _choose(q, k, normals, variance, bool(options.get("wide", False)), impl)


def _choose(q: Tensor, k: Tensor, normals: Tensor | None, variance: bool, wide: bool, impl: str) -> Choice:
    return choose(impl, q, lambda: triton.against_heads(q, k, normals, variance, wide))


def _check(q: Tensor, k: Tensor, normals: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x, "(B, H, T, D)", 4)
    check_same("q", q, k=k)
    check_size("k", "batch size", k.shape[0], q.shape[0], "q")
    check_size("k", "head dimension", k.shape[3], q.shape[3], "q")
    if normals is not None:
        check_size("k", "number of heads", k.shape[1], q.shape[1], "q")
        check_tensor("normals", normals, "(R, H, 1, D)", 4)
        check_shape("normals", normals, (normals.shape[0], q.shape[1], 1, q.shape[3]))
