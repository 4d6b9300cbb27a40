"""The kernel of softmax attention and its positive random features, on plain tensors."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class PositiveFeatures(NamedTuple):
    """``Phi(x)_m = sqrt(alpha_m / M) phi(x; z_m)`` with ``phi(x; z) = exp(z . y - |y|^2 / 2)``, ``y = sqrt(scale) x``.

    Under ``z ~ N(0, I)`` the mean of ``phi(x; z) phi(x'; z)`` is ``K(x, x') = exp(scale x . x')``, the kernel of
    softmax attention. Where z is drawn from a density q relative to N(0, I), ``alpha = 1 / q(z)`` keeps this mean.
    """

    z: Tensor  # (H, M, D)
    log_alpha: Tensor  # (H, M)

    @property
    def number(self) -> int:
        return self.z.shape[-2]


def normal_features(heads: int, count: int, dim: int, generator: Generator | None = None) -> PositiveFeatures:
    """Draw features uniformly: ``z ~ N(0, I)``, ``alpha = 1``."""
    z = torch.randn(heads, count, dim, generator=generator, dtype=torch.float64)
    return PositiveFeatures(z, z.new_zeros(heads, count))


def scaled(x: Tensor, scale: float | None = None) -> Tensor:
    """``y = sqrt(scale) x``, so that ``K(x, x') = exp(y . y')``; None: ``1 / sqrt(D)``, as in softmax attention."""
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be > 0, or None for 1 / sqrt(D), got {scale!r}")
    return x * (x.shape[-1] ** -0.25 if scale is None else math.sqrt(scale))


def log_features(y: Tensor, features: PositiveFeatures) -> Tensor:
    """``log Phi`` of scaled inputs: ``(..., H, N, D) -> (..., H, N, M)``. In logarithms, since Phi itself overflows."""
    z, log_alpha = (part.to(y) for part in features)
    half = (log_alpha - math.log(features.number)) / 2
    return y @ z.mT - y.square().sum(-1, keepdim=True) / 2 + half.unsqueeze(-2)


def log_estimate(y_q: Tensor, y_k: Tensor, features: PositiveFeatures) -> Tensor:
    """``log K^(x, x') = log(Phi(x) . Phi(x'))``: scaled ``(..., H, N, D)``, ``(..., H, N', D) -> (..., H, N, N')``.

    The features of each row are divided by the largest of them, whose logarithm is added to the result. An estimate
    below the smallest number of the dtype in these units is set to that number, so that its logarithm stays finite.
    """
    log_q, log_k = log_features(y_q, features), log_features(y_k, features)
    top_q, top_k = (x.detach().amax(-1, keepdim=True) for x in (log_q, log_k))
    products = (log_q - top_q).exp() @ (log_k - top_k).exp().mT
    return products.clamp_min(torch.finfo(products.dtype).tiny).log() + top_q + top_k.mT
