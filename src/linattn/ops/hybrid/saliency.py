"""Which tokens are worth keeping exact: scores from queries and keys alone, and the order in which they are chosen.

    p_t = exp(s_tt) / sum_{i in W_t} exp(s_ti),     s_ti = scale q_t . k_i,     W_t = the last tokens up to t

The logarithm of p is computed as ``-log(1 + exp(log sum_{i != t} exp(s_ti) - s_tt))``, which keeps its digits where p
is close to 1. A token that attends to itself carries what its window does not. ``log p_t`` ranks tokens as the
divergence between the attention of t with and without itself, ``p log((p + eps) / eps) + (1 - p) log(1 - p)``, does,
because that grows with p. The two agree for one query head, and for the largest score of several heads that share a
key head, but not for their mean: a head that hardly attends to the token pulls a mean of logarithms down, and a head
that attends strongly raises a mean of divergences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.types import Reduce, SalientBudget, Score

PUBLISHED_EPS = 1e-8  # inside the logarithms of the divergence


@torch.no_grad()
def self_saliency(
    q: Tensor, k: Tensor, real: Tensor, window: int, kind: Score = "log_prob", reduce: Reduce = "mean"
) -> Tensor:
    """How much each token attends to itself among the last ``window`` tokens: ``(B, H_kv, S)``, without gradients.

    Args:
        q: ``(B, H, S, K)``, times the scale of the logits.
        k: ``(B, H_kv, S, K)``; the scores of the query heads that share a key head are reduced to one.
        real: ``(B, S)`` bool; the others are in no window and score 0.
        window: number of tokens of ``W_t``, including t.
        kind: ``"log_prob"``: ``log p_t``; ``"kl"``: the divergence, with 1e-8 inside its logarithms as published.
            While ``p > 1e-8`` both choose the same tokens if a key head has one query head, or with ``reduce="max"``.
            Their means over several query heads choose differently: with 4 independent heads, about half of the
            chosen tokens are the same.
        reduce: ``"mean"`` or ``"max"`` over the query heads of a key head.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid.saliency import self_saliency
        >>> k = torch.tensor([[0.0, 1.0], [0.0, 1.0], [4.0, 0.0]])[None, None]
        >>> scores = self_saliency(k, k, torch.ones(1, 3, dtype=torch.bool), window=2)
        >>> scores.argsort().flatten().tolist()  # one of two equal tokens, a new one, the first
        [1, 2, 0]
    """
    H_kv, S = k.shape[1], k.shape[2]
    n = max(1, -(-S // window))  # one block where there are no tokens at all
    more = n * window - S
    q = F.pad(q, (0, 0, 0, more)) if more else q
    # (B, H_kv, n, G W, K): heads of a group beside the tokens of a block, so that they share one copy of its keys
    q = q.unflatten(2, (n, window)).unflatten(1, (H_kv, -1)).transpose(2, 3).flatten(3, 4)
    # The block before and its own: (B, H_kv, n, K, 2W)
    keys = F.pad(k, (0, 0, window, more)).unfold(2, 2 * window, window)
    seen = F.pad(real, (window, more)).unfold(1, 2 * window, window)  # (B, n, 2W)
    t, i = torch.arange(window, 2 * window, device=k.device)[:, None], torch.arange(2 * window, device=k.device)
    hidden = ~(((t > i) & (t - i < window)) & seen.unsqueeze(2))[:, None, :, None]  # (B, 1, n, 1, W, 2W), itself too
    logits = (q @ keys).unflatten(3, (-1, window))  # (B, H_kv, n, G, W, 2W)
    itself = logits[..., window:].diagonal(dim1=-2, dim2=-1)
    others = logits.masked_fill(hidden, -torch.inf)
    scores = of_group(score_of(itself, others, kind), reduce, 3).flatten(2)[..., :S]
    return scores.masked_fill(~real[:, None], 0)


def score_of(itself: Tensor, others: Tensor, kind: Score) -> Tensor:
    """Score each query head's attention to its own token, before heads are reduced.

    With the token itself in the softmax, it has the weight p and each other token of the window ``a_i = (1 - p) b_i``;
    without it, the others have the weights ``b_i``.

    Args:
        itself: ``(...)``, the logit of the token itself.
        others: ``(..., N)``, the logits of the window's other tokens; -inf: not in the window.
    """
    total, eps = others.logsumexp(-1), PUBLISHED_EPS
    log_p = -torch.logaddexp(total - itself, itself.new_zeros(()))
    if kind == "log_prob":
        return log_p
    p, rest = log_p.exp(), -torch.logaddexp(itself - total, itself.new_zeros(()))
    b = torch.where((total == -torch.inf).unsqueeze(-1), 0.0, (others - total.unsqueeze(-1)).exp())
    a = rest.exp().unsqueeze(-1) * b
    return p * ((p + eps) / eps).log() + (a * ((a + eps) / (b + eps)).log()).sum(-1)


def of_group(scores: Tensor, reduce: Reduce, dim: int) -> Tensor:
    """Reduce the scores of the query heads that share a key head, which lie along ``dim``, to one."""
    return scores.mean(dim) if reduce == "mean" else scores.amax(dim)


def top_of_chunk(scores: Tensor, position: Tensor, budget: SalientBudget) -> Tensor:
    """Which of the tokens ``(..., chunk)`` of complete chunks are chosen: sinks, higher scores, earlier tokens."""
    sinks = position < budget.sinks
    order = scores.masked_fill(sinks, torch.inf).argsort(dim=-1, descending=True, stable=True)
    return (order.argsort(-1) < budget.per_chunk) | sinks.expand_as(scores)


def best_first(scores: Tensor, position: Tensor, alive: Tensor, budget: SalientBudget) -> Tensor:
    """Order of the entries ``(..., N)`` by rank: sinks, higher scores, earlier tokens; entries not alive come last."""
    scores = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(position < budget.sinks, torch.inf)
    order = position.argsort(dim=-1, stable=True)
    ranked = scores.masked_fill(~alive, -torch.inf).gather(-1, order)
    return order.gather(-1, ranked.argsort(dim=-1, descending=True, stable=True))
