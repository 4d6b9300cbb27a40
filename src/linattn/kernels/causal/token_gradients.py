"""The parts of gradients that are made token by token, after the walks or between them: of row sums and decays."""

import torch
from torch import Tensor

from linattn.kernels.causal.passes import Marks, Passes, Rows
from linattn.kernels.common.launching import launch
from linattn.kernels.common.support import padded


def normalizer_gradient(p: Passes, out: Tensor, d_out: Tensor, den: Tensor) -> Rows:
    """1 / n, and the gradient of the row sums times n; see the kernel."""
    from linattn.kernels.causal.device.normalizer_gradient import normalizer_gradient as kernel

    H, T, V = out.shape[1:]
    scale, e = torch.empty_like(den), torch.empty_like(den)
    block = max(1, 4096 // padded(V))
    launch(
        kernel, -(-den.numel() // block), out, *out.stride(), d_out, *d_out.stride(), den, scale, e,
        H, T, den.numel(), p.eps, V=V, BV=padded(V), C=block, NORMALIZER=p.norm, TIMES_N=True, num_warps=4,
    )  # fmt: skip
    return scale, e


def correct_denominator(p: Passes, rows: Rows, den: Tensor, along: Tensor, against: Tensor | None) -> None:
    """Correct the gradient of the row sums and the dots that were made with it, in place; see the kernel."""
    from linattn.kernels.causal.device.correction import correct_denominator as kernel

    block = 256
    launch(
        kernel, -(-den[0].numel() // block), along, along.stride(0), along.stride(1),
        against, 0 if against is None else against.stride(1), den[0], None if against is None else den[1], *rows,
        den[0].numel(),
        TILES=along.shape[1], KEY_TILES=p.query_gradient_tiles, NORM=p.norm, AGAINST=against is not None, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


def decay_gradient(
    p: Passes, da: Tensor, q_dots: Tensor, k_dots: Tensor, marks: Marks, d_marks: Marks, *, against: bool,
    start: bool,
) -> None:  # fmt: skip
    """Write the decays' gradient to da (B, HS, T), from the dots of one direction's sweeps and the states they kept."""
    from linattn.kernels.causal.device.decay_gradient import decay_gradient as kernel

    N, H, HS, T, K, V = p.sizes
    stretches = -(-T // marks.stretch)
    launch(
        kernel, N * HS * stretches, q_dots, q_dots.stride(1), k_dots, k_dots.stride(1),
        marks.kv, d_marks.kv, marks.z, d_marks.z, p.cu, da, T, stretches, marks.places, HS,
        QT=q_dots.shape[1], KT=k_dots.shape[1], G=H // HS, STRETCH=marks.stretch, SIZE=K * V, K=K,
        BLOCK=min(4096, padded(K * V)), BK=padded(K), Z=marks.z is not None,
        EXCLUSIVE=p.key_index != against, NEGATE=against, ADD=against, PACKED=p.cu is not None, START=start,
        num_warps=4,
    )  # fmt: skip
