"""What a decay does inside one chunk of L tokens.

With the chunk's inclusive sums c of ``a = log lambda`` and the potential ``f = c`` (decay_index "query") or
``f = c - a`` ("key"), token s reaches token t >= s with the factor ``exp(f_t - f_s)``. The state from before the chunk
is read with ``exp(f_t)``, token s is written into the state with ``exp(c_L - f_s)`` and the old state is kept with
``exp(c_L)``. f never increases, so no exponent is ever positive. Potentials are fp64 if the device has it: a difference
of two long sums keeps no digits in fp32 when the decay is strong.

M chunks of R rows are computed at once, N = R M: k ``(N, L, K)``, v ``(N, L, V)`` and q ``(N, G L, K)``. The G query
heads that share a key head lie one after the other, so that one matrix product serves them all.
"""

import torch
from torch import Tensor

from linattn.ops.shared.prepare import widen


class NoDecay:
    """No decay: every visible pair counts fully. In a strict chunk no token sees itself."""

    def __init__(self, length: int, strict: bool) -> None:
        self.length, self.diagonal = length, -1 if strict else 0
        self.keep: Tensor | None = None  # what each chunk leaves of the state, (R, M or 1, K or 1, 1); None: all of it

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

    def read(self, q: Tensor) -> Tensor:
        """Queries with the factors with which they read the state from before the chunk."""
        return q

    def write(self, k: Tensor) -> Tensor:
        """Keys with the factors with which they are written into the state after the chunk."""
        return k

    def kept(self, x: Tensor) -> Tensor:
        """``x (N, K)`` of each chunk times what the chunk keeps of the state."""
        return x


class ScalarDecay(NoDecay):
    """One decay per token and head: a matrix of weights on the scores."""

    def __init__(self, log_decay: Tensor, chunks: int, key_index: bool, strict: bool, dtype: torch.dtype) -> None:
        """``log_decay (R, M, L)``, or ``(R, 1, L)`` where all M chunks decay alike."""
        super().__init__(log_decay.shape[2], strict)
        self.chunks = chunks
        f, c = potentials(log_decay, key_index)
        log_weights = f.unsqueeze(-1) - f.unsqueeze(-2)
        self.weights = exp_tril(log_weights, self.diagonal, dtype).unsqueeze(2)  # (R, M, 1, L, L)
        self.reading = f.exp().to(dtype)[:, :, None, :, None]  # (R, M, 1, L, 1)
        self.writing = (c[..., -1:] - f).exp().to(dtype)[:, :, None, :, None]
        self.keep = c[..., -1].exp().to(dtype)[:, :, None, None]  # (R, M, 1, 1)

    def _weigh(self, scores: Tensor) -> Tensor:
        scores.view(-1, self.chunks, scores.shape[1] // self.length, self.length, self.length).mul_(self.weights)
        return scores

    def read(self, q: Tensor) -> Tensor:
        return (self.split(q) * self.reading).view(q.shape)

    def write(self, k: Tensor) -> Tensor:
        return (self.split(k) * self.writing).view(k.shape)

    def kept(self, x: Tensor) -> Tensor:
        assert self.keep is not None
        return (x.view(-1, self.chunks, x.shape[1]) * self.keep.squeeze(-1)).view(x.shape)

    def split(self, x: Tensor) -> Tensor:
        """Reshape (N, G L, D) to (R, M, G, L, D)."""
        return x.view(x.shape[0] // self.chunks, self.chunks, x.shape[1] // self.length, self.length, x.shape[2])


def potentials(log_decay: Tensor, key_index: bool) -> tuple[Tensor, Tensor]:
    """f and c of the module's docstring, summed along dimension 2."""
    a = widen(log_decay)
    c = a.cumsum(2)
    return (c - a if key_index else c), c


def exp_tril(log_weights: Tensor, diagonal: int, dtype: torch.dtype) -> Tensor:
    """exp on and below the diagonal of the last two dimensions, 0 above it, where exp might overflow."""
    hidden = torch.ones(log_weights.shape[-2:], dtype=torch.bool, device=log_weights.device).triu(diagonal + 1)
    return log_weights.to(dtype).masked_fill_(hidden, -torch.inf).exp_()
