"""How spread out attention is: entropies of its rows in nats, how they follow the queries' norm, its map's rank."""

import math

import torch
from torch import Tensor


def entropy(weights: Tensor) -> Tensor:
    """Entropy of each row of an attention map: ``(..., Tk) -> (...)``.

    ``E = -sum_s p_s log p_s``, ``p_s = |w_s| / sum_r |w_r|``

    It ranges from 0, one key alone, to ``log Tk``, all keys alike. Rows need not sum to 1. Negative weights
    (``inline``, ``retention``, ``hydra``) count by their absolute value: a key that is subtracted is attended to as
    well. A row without any weight, such as that of a ReLU query that matches no key, has the entropy 0: it spreads over
    nothing.

    Example:
        >>> import torch
        >>> entropy(torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
        tensor([0.6931, 0.0000, 0.0000])
    """
    return _shannon(weights.abs())


def positive_sequence_entropy(x: Tensor) -> Tensor:
    """Positive-sequence entropy (PSE) of NaLaFormer: ``(..., T) -> (...)``.

    ``PSE(x) = -sum_i (x_i / s) log(x_i / s)``, ``s = sum_i x_i``, for ``x_i >= 0``

    Negative parts are cut off, so on an attention map it differs from ``entropy`` only where weights are negative. It
    is unchanged by a scale of x, also inside a homogeneous map ``f(c x) = c^p f(x)``, which is why a normalised linear
    attention does not see the norm of its queries. Inside exp, a large scale lowers it.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> positive_sequence_entropy(x), positive_sequence_entropy(5 * x), positive_sequence_entropy((5 * x).exp())
        (tensor(1.0114), tensor(1.0114), tensor(0.0407))
    """
    return _shannon(x.clamp(min=0))


def _shannon(sizes: Tensor) -> Tensor:
    # Divide by the largest first: sums of values near the ends of a dtype's range then stay inside it.
    largest = sizes.amax(-1, keepdim=True)
    sizes = sizes / torch.where(largest > 0, largest, 1)
    total = sizes.sum(-1, keepdim=True)
    return torch.special.entr(sizes / torch.where(total > 0, total, 1)).sum(-1)


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
    found: list[float | None] = []
    for pair in zip(*(x.detach().double().transpose(0, 1).flatten(1) for x in (entropy, norm)), strict=True):
        a, b = (x - x.mean() for x in pair)
        away = zip((a, b), pair, (rounding, 1e-3), strict=True)
        if not a.numel() or any(bool(y.abs().amax() <= share * x.abs().amax()) for y, x, share in away):
            found.append(None)
        else:  # what rounding leaves beyond +-1 is removed
            found.append(round(float((a / a.norm()) @ (b / b.norm())), 12))
    return found


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
