"""Attention written out as a matrix of weights, in fp64: what every mechanism must agree with."""

import torch
from torch import Tensor

FORMS = ("auto", "reference", "recurrent")
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # fp64 sums of a few dozen terms, in two orders


def draw(heads: int = 4, kv_heads: int = 2, length: int = 11, dim: int = 6, seed: int = 0) -> tuple[Tensor, ...]:
    """q ``(2, H, T, D)``, k and v ``(2, H_kv, T, D)``, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, length, dim), (2, kv_heads, length, dim), (2, kv_heads, length, dim))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def draw_x(length: int = 11) -> Tensor:
    """Inputs of gates ``(2, T, 10)``, in fp64."""
    return torch.randn(2, length, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def scores(phi: Tensor, psi: Tensor) -> Tensor:
    return torch.einsum("bhtf,bhsf->bhts", phi, per_query_head(psi, phi.shape[1]))


def weighted(weights: Tensor, v: Tensor, causal: bool, normalized: bool = True, eps: float = 1e-6) -> Tensor:
    """``sum_s w_ts v_s / (sum_s w_ts + eps)`` over the visible s."""
    if causal:
        visible = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
        weights = torch.where(visible, weights, 0)
    total = torch.einsum("bhts,bhsd->bhtd", weights, per_query_head(v, weights.shape[1]))
    return total / (weights.sum(-1, keepdim=True) + eps) if normalized else total
