"""What a decay does inside one chunk of L tokens.

With the chunk's inclusive sums c of ``a = log lambda`` and the potential ``f = c`` (decay_index "query") or
``f = c - a`` ("key"), token s reaches token t >= s with the factor ``exp(f_t - f_s)``. The state from before the chunk
is read with ``exp(f_t)``, token s is written into the state with ``exp(c_L - f_s)`` and the old state is kept with
``exp(c_L)``. f never increases, so no exponent is ever positive. Potentials are fp64 if the device has it: a difference
of two long sums keeps no digits in fp32 when the decay is strong.

M chunks of R rows are computed at once, N = R M: k ``(N, L, K)``, v ``(N, L, V)`` and q ``(N, G L, K)``. The G query
heads that share a key head lie one after the other, so that one matrix product serves them all.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.shared.call import widen

_LEAF = 4  # tokens closer than this are weighed pair by pair where each channel decays by itself


class NoDecay:
    """No decay: every visible pair counts fully. In a strict chunk no token sees itself."""

    # Factors (R, M, 1, L, 1 or K) with which queries read the state from before the chunk and keys are written into the
    # state after it, and what each chunk leaves of the state, (R, M or 1, K or 1, 1); None: all of it.
    reading: Tensor | None = None
    writing: Tensor | None = None
    keep: Tensor | None = None

    def __init__(self, length: int, chunks: int, strict: bool) -> None:
        self.length, self.chunks, self.diagonal = length, chunks, -1 if strict else 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, num: Tensor, den: Tensor) -> None:
        """Add the pairs inside the chunk to the numerator ``(N, G L, V)`` and denominator ``(N, G L, 1)``."""
        scores = self._weigh(torch.bmm(q, k.mT))
        num.baddbmm_(scores, v)
        den.add_(scores.sum(-1, keepdim=True))

    def pull_back(self, q: Tensor, k: Tensor, v: Tensor, d_num: Tensor, d_den: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from the pairs inside the chunk."""
        d_scores = self._weigh(torch.baddbmm(d_den, d_num, v.mT))
        scores = self._weigh(torch.bmm(q, k.mT))
        return torch.bmm(d_scores, k), torch.bmm(d_scores.mT, q), torch.bmm(scores.mT, d_num)

    def _weigh(self, scores: Tensor) -> Tensor:
        """Scores ``(N, G L, L)``, weighted in place."""
        scores.view(-1, self.length, self.length).tril_(self.diagonal)
        return scores

    def times(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """Tokens ``(N, G L, D)`` times ``reading`` or ``writing``."""
        return x if factor is None else (self.split(x) * factor).view(x.shape)

    def split(self, x: Tensor) -> Tensor:
        """Reshape (N, G L, D) to (R, M, G, L, D)."""
        return x.view(x.shape[0] // self.chunks, self.chunks, x.shape[1] // self.length, self.length, x.shape[2])

    def kept(self, x: Tensor) -> Tensor:
        """``x (N, K)`` of each chunk times what the chunk keeps of the state."""
        return x if self.keep is None else (x.view(-1, self.chunks, x.shape[1]) * self.keep.squeeze(-1)).view(x.shape)


class ScalarDecay(NoDecay):
    """One decay per token and head: a matrix of weights on the scores."""

    def __init__(self, log_decay: Tensor, chunks: int, key_index: bool, strict: bool, dtype: torch.dtype) -> None:
        """``log_decay (R, M, L, 1)``, or ``(R, 1, L, 1)`` where all M chunks decay alike; ``(.., K)`` per channel."""
        super().__init__(log_decay.shape[2], chunks, strict)
        self.f, c = potentials(log_decay, key_index)
        self.dtype, total = dtype, c[:, :, -1:]
        self.reading = self.f.exp().to(dtype).unsqueeze(2)
        self.writing = (total - self.f).exp().to(dtype).unsqueeze(2)
        self.keep = total.squeeze(2).exp().to(dtype).unsqueeze(-1)

    @cached_property
    def weights(self) -> Tensor:
        """``(R, M, 1, L, L)``"""
        f = self.f.squeeze(-1)
        return exp_tril(f.unsqueeze(-1) - f.unsqueeze(-2), self.diagonal, self.dtype).unsqueeze(2)

    def _weigh(self, scores: Tensor) -> Tensor:
        scores.view(-1, self.chunks, scores.shape[1] // self.length, self.length, self.length).mul_(self.weights)
        return scores


class ChannelDecay(ScalarDecay):
    """Pairs inside a chunk when each key channel decays by itself.

    The weight ``exp(f_t - f_s)`` of a channel does not factor out of the score. Split at a token r between s and t
    it does, ``exp(f_t - f_r) exp(f_r - f_s)``, and both factors are at most 1. So the chunk is halved, its later half
    sees the earlier one through the split, and the halves are treated in the same way. The last few neighbours are
    weighed directly.
    """

    def __init__(self, *decay: Any) -> None:
        super().__init__(*decay)
        blocks = -(-self.length // _LEAF)
        self.halves = [_LEAF << i for i in range((blocks - 1).bit_length())]
        self.padding = _LEAF * (1 << len(self.halves)) - self.length
        self.f = torch.cat([self.f, self.f[:, :, -1:].expand(-1, -1, self.padding, -1)], dim=2).unsqueeze(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, num: Tensor, den: Tensor) -> None:
        q, k, v = self._pad(q), self._pad(k), self._pad(v)
        inside = q.new_zeros(*q.shape[:-1], v.shape[-1] + 1)
        v = F.pad(v, (0, 1), value=1.0)  # the denominator is the value 1
        _leaves(inside).add_(self._near_scores(q, k, self._near_weights()) @ _leaves(v))
        for half in self.halves:
            decay_q, decay_k = self._across(half)
            scores = (_later(q, half) * decay_q) @ (_earlier(k, half) * decay_k).mT
            _later(inside, half).add_(scores @ _earlier(v, half))
        inside = inside[..., : self.length, :]
        num.add_(inside[..., :-1].reshape(num.shape))
        den.add_(inside[..., -1:].reshape(den.shape))

    def pull_back(self, q: Tensor, k: Tensor, v: Tensor, d_num: Tensor, d_den: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_out = self._pad(torch.cat([d_num, d_den], dim=-1))
        q, k, v = self._pad(q), self._pad(k), F.pad(self._pad(v), (0, 1), value=1.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(d_out)
        weights = self._near_weights()
        d_near = _leaves(d_out) @ _leaves(v).mT
        _leaves(dv).add_(self._near_scores(q, k, weights).mT @ _leaves(d_out))
        _leaves(dq).add_(((d_near.unsqueeze(-1) * weights) * _leaves(k).unsqueeze(-3)).sum(-2))
        _leaves(dk).add_(((d_near.unsqueeze(-1) * weights) * _leaves(q).unsqueeze(-2)).sum(-3))
        for half in self.halves:
            decay_q, decay_k = self._across(half)
            later_q, earlier_k = _later(q, half) * decay_q, _earlier(k, half) * decay_k
            d_scores = _later(d_out, half) @ _earlier(v, half).mT
            _later(dq, half).add_((d_scores @ earlier_k) * decay_q)
            _earlier(dk, half).add_((d_scores.mT @ later_q) * decay_k)
            _earlier(dv, half).add_((earlier_k @ later_q.mT) @ _later(d_out, half))
        return self._crop(dq), self._crop(dk.sum(2)), self._crop(dv[..., :-1].sum(2))

    def _pad(self, x: Tensor) -> Tensor:
        """Reshape (N, G L, D) to (R, M, G, padded L, D)."""
        return F.pad(self.split(x), (0, 0, 0, self.padding))

    def _crop(self, x: Tensor) -> Tensor:
        """Reshape (R, M, .., padded L, D) to (N, .. L, D)."""
        x = x[..., : self.length, :]
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2:-1].numel(), x.shape[-1])

    def _near_weights(self) -> Tensor:
        """Weights of pairs of neighbours, (R, M, 1, blocks, LEAF, LEAF, K)."""
        f = _leaves(self.f)
        log_weights = (f.unsqueeze(-2) - f.unsqueeze(-3)).movedim(-1, -3)
        return exp_tril(log_weights, self.diagonal, self.dtype).movedim(-3, -1)

    def _near_scores(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Weighted scores of pairs of neighbours, (R, M, G, blocks, LEAF, LEAF)."""
        return ((weights * _leaves(k).unsqueeze(-3)) @ _leaves(q).unsqueeze(-1)).squeeze(-1)

    def _across(self, half: int) -> tuple[Tensor, Tensor]:
        """Decays from the split (the last earlier token) to each later query, and to it from each earlier key."""
        split = _earlier(self.f, half)[..., -1:, :]
        later, earlier = _later(self.f, half) - split, split - _earlier(self.f, half)
        return later.to(self.dtype).exp_(), earlier.to(self.dtype).exp_()


def _leaves(x: Tensor) -> Tensor:
    """(.., L, D) as (.., blocks, LEAF, D)."""
    return x.unflatten(-2, (-1, _LEAF))


def _earlier(x: Tensor, half: int) -> Tensor:
    """The first halves of blocks of ``2 half`` tokens, (.., blocks, half, D); a view."""
    return x.unflatten(-2, (-1, 2, half))[..., 0, :, :]


def _later(x: Tensor, half: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, half))[..., 1, :, :]


def potentials(log_decay: Tensor, key_index: bool) -> tuple[Tensor, Tensor]:
    """f and c of the module's docstring, summed along dimension 2."""
    a = widen(log_decay)
    c = a.cumsum(2)
    return (c - a if key_index else c), c


def exp_tril(log_weights: Tensor, diagonal: int, dtype: torch.dtype) -> Tensor:
    """exp on and below the diagonal of the last two dimensions, 0 above it, where exp might overflow."""
    hidden = torch.ones(log_weights.shape[-2:], dtype=torch.bool, device=log_weights.device).triu(diagonal + 1)
    return log_weights.to(dtype).masked_fill_(hidden, -torch.inf).exp_()
