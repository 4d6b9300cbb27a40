"""How many directions an attention map has."""

import math

import torch
from torch import Tensor

from linattn.analysis.entropy import entropy

# Up to this size a CPU is faster than a GPU, whose solver takes many small matrices one after the other.
SMALL = 512


def effective_rank(weights: Tensor) -> Tensor:
    """Effective rank (Roy and Vetterli, 2007) of matrices: ``(..., Tq, Tk) -> (...)``.

    ``exp(-sum_i p_i log p_i)``, ``p_i = sigma_i / sum_j sigma_j`` over the singular values: 1 for an outer product, n
    for n equal singular values. A zero matrix has rank 0. The rank of linear attention cannot exceed the width of its
    features, and rarely comes near it. NaN for matrices with a number that is not finite.

    Example:
        >>> import torch
        >>> effective_rank(torch.stack([torch.eye(4), torch.ones(4, 4), torch.zeros(4, 4)])).round(decimals=4)
        tensor([4., 1., 0.])
    """
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    finite = weights.isfinite().all(-1).all(-1)
    matrices = torch.where(finite[..., None, None], weights, 0)
    if max(matrices.shape[-2:]) <= SMALL:
        matrices = matrices.cpu()
    sigma = torch.linalg.svdvals(matrices).to(weights.device)
    rank = torch.where(sigma.amax(-1) > 0, entropy(sigma).exp(), 0)
    return rank.masked_fill(~finite, math.nan)
