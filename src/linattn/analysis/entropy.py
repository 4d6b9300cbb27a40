"""Entropies of rows of attention weights, in nats: how spread out attention is."""

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
