"""What a decay does inside one chunk of L tokens.

With the chunk's inclusive sums c of ``a = log lambda`` and the potential ``f = c`` (decay_index "query") or
``f = c - a`` ("key"), token s reaches token t >= s by ``exp(f_t - f_s)``; the state from before the chunk is read
by ``exp(f_t)``, token s is written into the state by ``exp(c_L - f_s)`` and the old state is kept by ``exp(c_L)``.
f never increases, so no exponent is ever positive. Potentials are fp64 where the device has it: a difference of
two long sums keeps no digits in fp32 when the decay is strong.

Shapes: q ``(B, H, G, L, K)`` with G query heads per key head; k ``(B, H, 1, L, K)``, v ``(B, H, 1, L, V)``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAF = 4  # pairs of tokens closer than this are weighed one by one under a per-channel decay


class NoDecay:
    """Every visible pair counts fully; a strict chunk lets no token see itself."""

    def __init__(self, strict: bool) -> None:
        self.diagonal = -1 if strict else 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator (.., L, V) and denominator (.., L) from the pairs inside the chunk."""
        scores = self._weigh(q @ k.mT)
        return scores @ v, scores.sum(-1)

    def pull_back(self, q: Tensor, k: Tensor, v: Tensor, d_num: Tensor, d_den: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from the pairs inside the chunk (k and v still per query head)."""
        d_scores = self._weigh((d_num @ v.mT).add_(d_den.unsqueeze(-1)))
        scores = self._weigh(q @ k.mT)
        return d_scores @ k, d_scores.mT @ q, scores.mT @ d_num

    def _weigh(self, scores: Tensor) -> Tensor:
        return scores.tril_(self.diagonal)

    def read(self, q: Tensor) -> Tensor:
        return q

    def write(self, k: Tensor) -> Tensor:
        return k

    def keep(self, state: Tensor) -> Tensor:
        return state


class ScalarDecay(NoDecay):
    """One decay per token and head: a matrix of weights on the scores."""

    def __init__(self, log_decay: Tensor, key_index: bool, strict: bool, dtype: torch.dtype) -> None:
        """``log_decay (B or 1, H, L)``."""
        super().__init__(strict)
        f, c = _potentials(log_decay, key_index)
        self.weights = _strict_tril(f.unsqueeze(-1) - f.unsqueeze(-2), self.diagonal, dtype).unsqueeze(2)
        self._read = f.exp().to(dtype)[:, :, None, :, None]
        self._write = (c[..., -1:] - f).exp().to(dtype)[:, :, None, :, None]
        self._keep = c[..., -1].exp().to(dtype)[:, :, None, None, None]

    def _weigh(self, scores: Tensor) -> Tensor:
        return scores.mul_(self.weights)

    def read(self, q: Tensor) -> Tensor:
        return q * self._read

    def write(self, k: Tensor) -> Tensor:
        return k * self._write

    def keep(self, state: Tensor) -> Tensor:
        return state * self._keep


class ChannelDecay(ScalarDecay):
    """One decay per token and key channel.

    A weight ``exp(f_t - f_s)`` per channel does not factor out of the score. Split at any token r between s and t
    it does, ``exp(f_t - f_r) exp(f_r - f_s)``, with both factors at most 1: so halve the chunk, let the later half
    see the earlier one through the split, and go on inside the halves. The last few neighbours are weighed directly.
    """

    def __init__(self, log_decay: Tensor, key_index: bool, strict: bool, dtype: torch.dtype) -> None:
        """``log_decay (B, H, L, K)``."""
        NoDecay.__init__(self, strict)
        f, c = _potentials(log_decay, key_index)
        self.f, self.length = f, f.shape[2]
        self._read = f.exp().to(dtype).unsqueeze(2)
        self._write = (c[:, :, -1:] - f).exp().to(dtype).unsqueeze(2)
        self._keep = c[:, :, -1].exp().to(dtype)[:, :, None, :, None]
        blocks = -(-self.length // _LEAF)
        self.padded = _LEAF * (1 << (blocks - 1).bit_length())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, f = self._pad(q), self._pad(k), self._pad(v), self._pad_potential()
        num, den = torch.zeros_like(v).expand(*q.shape[:3], *v.shape[3:]).clone(), q.new_zeros(q.shape[:-1])
        near = self._near_scores(q, k, f)
        _leaves(num).add_(near @ _leaves(v))
        _leaves(den.unsqueeze(-1)).add_(near.sum(-1, keepdim=True))
        for half in self._halves():
            decay_q, decay_k = _across(f, half, q.dtype)
            scores = (_later(q, half) * decay_q) @ (_earlier(k, half) * decay_k).mT
            _later(num, half).add_(scores @ _earlier(v, half))
            _later(den.unsqueeze(-1), half).add_(scores.sum(-1, keepdim=True))
        return num[..., : self.length, :], den[..., : self.length]

    def pull_back(self, q: Tensor, k: Tensor, v: Tensor, d_num: Tensor, d_den: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, d_num, f = self._pad(q), self._pad(k), self._pad(v), self._pad(d_num), self._pad_potential()
        d_den = self._pad(d_den.unsqueeze(-1))
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(q)
        dv = q.new_zeros(*q.shape[:-1], v.shape[-1])
        d_near = _leaves(d_num) @ _leaves(v).mT + _leaves(d_den)
        weights = self._near_weights(f, q.dtype)
        _leaves(dv).add_(self._near_scores(q, k, f).mT @ _leaves(d_num))
        _leaves(dq).add_(torch.einsum("bhgnij,bhnijk,bhxnjk->bhgnik", d_near, weights, _leaves(k)))
        _leaves(dk).add_(torch.einsum("bhgnij,bhnijk,bhgnik->bhgnjk", d_near, weights, _leaves(q)))
        for half in self._halves():
            decay_q, decay_k = _across(f, half, q.dtype)
            later_q, earlier_k = _later(q, half) * decay_q, _earlier(k, half) * decay_k
            d_scores = _later(d_num, half) @ _earlier(v, half).mT + _later(d_den, half)
            _later(dq, half).add_((d_scores @ earlier_k) * decay_q)
            _earlier(dk, half).add_((d_scores.mT @ later_q) * decay_k)
            _earlier(dv, half).add_((later_q @ earlier_k.mT).mT @ _later(d_num, half))
        return dq[..., : self.length, :], dk[..., : self.length, :], dv[..., : self.length, :]

    def _halves(self) -> list[int]:
        return [_LEAF << i for i in range((self.padded // _LEAF).bit_length() - 1)]

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, self.padded - self.length))

    def _pad_potential(self) -> Tensor:
        last = self.f[:, :, -1:].expand(-1, -1, self.padded - self.length, -1)
        return torch.cat([self.f, last], dim=2)

    def _near_weights(self, f: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, H, blocks, LEAF, LEAF, K)."""
        f = f.unflatten(2, (-1, _LEAF))
        log_weights = (f.unsqueeze(4) - f.unsqueeze(3)).movedim(-1, 3)
        return _strict_tril(log_weights, self.diagonal, dtype).movedim(3, -1)

    def _near_scores(self, q: Tensor, k: Tensor, f: Tensor) -> Tensor:
        weights = self._near_weights(f, q.dtype)
        return torch.einsum("bhgnik,bhnijk,bhxnjk->bhgnij", _leaves(q), weights, _leaves(k))


def _potentials(log_decay: Tensor, key_index: bool) -> tuple[Tensor, Tensor]:
    """f and c of the module's docstring."""
    a = log_decay if log_decay.device.type == "mps" else log_decay.double()
    c = a.cumsum(2)
    return (c - a if key_index else c), c


def _strict_tril(log_weights: Tensor, diagonal: int, dtype: torch.dtype) -> Tensor:
    visible = torch.ones(log_weights.shape[-2:], dtype=torch.bool, device=log_weights.device).tril(diagonal)
    return log_weights.to(dtype).masked_fill_(~visible, -torch.inf).exp_()


def _leaves(x: Tensor) -> Tensor:
    """(.., L, D) as (.., blocks, LEAF, D)."""
    return x.unflatten(-2, (-1, _LEAF))


def _earlier(x: Tensor, half: int) -> Tensor:
    """The first halves of blocks of ``2 half`` tokens, (.., blocks, half, D); a view."""
    return x.unflatten(-2, (-1, 2, half))[..., 0, :, :]


def _later(x: Tensor, half: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, half))[..., 1, :, :]


def _across(f: Tensor, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decays from the split, the last earlier token, to each later query, and from each earlier key to it."""
    split = _earlier(f, half)[..., -1:, :]
    later, earlier = _later(f, half) - split, split - _earlier(f, half)
    return later.to(dtype).exp_().unsqueeze(2), earlier.to(dtype).exp_().unsqueeze(2)
