"""Whether longer queries attend more sharply."""

import torch
from torch import Tensor

SAME_NORM = 1e-3


def entropy_norm_correlation(entropy: Tensor, norm: Tensor) -> list[float | None]:
    """Pearson correlation between the entropy of a query's row and the query's norm, over all queries of a head.

    ``r = cov(E, |q|) / (std(E) std(|q|))`` for ``entropy`` and ``norm``, both ``(B, H, T)``: one number per head.

    Softmax sharpens as the norm grows, r < 0; a normalised linear attention with homogeneous features cannot see the
    norm. The result is None where nothing can be said: if entropies differ only by rounding, or norms by less than a
    thousandth, as those of normed queries do (the eps of a norm leaves more than rounding).

    Example:
        >>> import torch
        >>> norm = torch.tensor([[[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]])
        >>> entropy_norm_correlation(1 - 0.1 * norm, norm)
        [-1.0, None]
    """
    if entropy.shape != norm.shape or entropy.ndim != 3:
        raise ValueError(f"entropy and norm must be (B, H, T) alike, got {tuple(entropy.shape)}, {tuple(norm.shape)}")
    rounding = 64 * torch.finfo(entropy.dtype).eps
    heads = zip(*(x.detach().double().transpose(0, 1).flatten(1) for x in (entropy, norm)), strict=True)
    return [_pearson(a, b, (rounding, SAME_NORM)) for a, b in heads]


def _pearson(a: Tensor, b: Tensor, same: tuple[float, float]) -> float | None:
    """None if a or b stays within ``same`` of its mean, as a share of its largest value."""
    away = []
    for x, share in zip((a, b), same, strict=True):
        centred = x - x.mean()
        if not x.numel() or bool(centred.abs().amax() <= share * x.abs().amax()):
            return None
        away.append(centred / centred.norm())
    return round(float(away[0] @ away[1]), 12)  # remove what rounding leaves beyond +-1
