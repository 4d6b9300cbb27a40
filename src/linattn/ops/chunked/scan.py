"""The causal pass over chunks, and its gradient. Plain loops without autograd; ``library`` makes them one op.

Inside a chunk the weights are a small matrix; between chunks the state carries everything. Memory beyond inputs and
outputs: one chunk and one state forward, one state per chunk backward (recomputed, never kept from the forward).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.chunked.decay import ChannelDecay, NoDecay, ScalarDecay


class Scan(NamedTuple):
    """The inputs of a pass, grouped: q ``(B, H, G, T, K)``, k ``(B, H, 1, T, K)``, v ``(B, H, 1, T, V)``."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    cu_seqlens: Tensor | None
    chunk: int
    key_index: bool
    strict: bool
    dtype: torch.dtype

    def pieces(self) -> Iterator[tuple[slice, int, int]]:
        """Chunks in order: the rows of the state they belong to, and their tokens' start and end."""
        bounds = [0, self.k.shape[3]] if self.cu_seqlens is None else self.cu_seqlens.tolist()
        for n in range(len(bounds) - 1):
            rows = slice(None) if self.cu_seqlens is None else slice(n, n + 1)
            for start in range(bounds[n], bounds[n + 1], self.chunk):
                yield rows, start, min(start + self.chunk, bounds[n + 1])

    def tokens(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.cut(self.q, start, end), self.cut(self.k, start, end), self.cut(self.v, start, end)

    def cut(self, x: Tensor, start: int, end: int) -> Tensor:
        return x[:, :, :, start:end].to(self.dtype)

    def decay(self, start: int, end: int, known: dict[int, NoDecay]) -> NoDecay:
        """The chunk's decay; one per head is the same in every chunk of a length, and kept in ``known``."""
        a = self.log_decay
        if a is None:
            return NoDecay(self.strict)
        if a.ndim == 1:
            length = end - start
            if length not in known:
                one_each = a[None, :, None].expand(-1, -1, length)
                known[length] = ScalarDecay(one_each, self.key_index, self.strict, self.dtype)
            return known[length]
        kind = ScalarDecay if a.ndim == 3 else ChannelDecay
        return kind(a[:, :, start:end], self.key_index, self.strict, self.dtype)


def forward(scan: Scan, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator ``(B, H, G, T, V)`` and denominator; ``kv (N, H, 1, K, V)`` and ``z (N, H, 1, K, 1)`` are updated."""
    B, H, G, T, _ = scan.q.shape
    num = torch.empty(B, H, G, T, scan.v.shape[-1], dtype=scan.dtype, device=scan.q.device)
    den = torch.empty(B, H, G, T, dtype=scan.dtype, device=scan.q.device)
    known: dict[int, NoDecay] = {}
    for rows, start, end in scan.pieces():
        q, k, v = scan.tokens(start, end)
        decay = scan.decay(start, end, known)
        inside, inside_sum = decay.attend(q, k, v)
        q = decay.read(q)
        torch.add(inside, q @ kv[rows], out=num[:, :, :, start:end])
        torch.add(inside_sum, (q @ z[rows]).squeeze(-1), out=den[:, :, :, start:end])
        _advance(decay, k, v, kv[rows], z[rows])
    return num, den


def _advance(decay: NoDecay, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> None:
    k = decay.write(k)
    kv.copy_(decay.keep(kv) + k.mT @ v)
    z.copy_(decay.keep(z) + k.sum(-2).unsqueeze(-1))


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None


def backward(scan: Scan, kv: Tensor, z: Tensor, d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor) -> Gradients:
    """Gradients of the inputs; ``d_kv`` and ``d_z`` come as those of the final state, leave as the initial one's.

    The decay's gradient needs no score matrix: through the potentials it is ``q.dq - k.dk`` token by token, plus
    what the chunk's total decay did to the state.
    """
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in scan[:3])
    da = None if scan.log_decay is None else torch.zeros_like(scan.log_decay, dtype=scan.dtype)
    before, known = [], dict[int, NoDecay]()
    for rows, start, end in scan.pieces():
        before.append((rows, start, end, kv[rows].clone(), z[rows].clone()))
        _, k, v = scan.tokens(start, end)
        _advance(scan.decay(start, end, known), k, v, kv[rows], z[rows])
    while before:
        rows, start, end, kv_in, z_in = before.pop()
        q, k, v = scan.tokens(start, end)
        decay = scan.decay(start, end, known)
        d_out, d_sum = scan.cut(d_num, start, end), scan.cut(d_den, start, end)
        q_part, k_part, v_part = decay.pull_back(q, k, v, d_out, d_sum)
        q_part = q_part + decay.read(d_out @ kv_in.mT + d_sum.unsqueeze(-1) * z_in.mT)
        k_state = decay.write(v @ d_kv[rows].mT + d_z[rows].mT)
        k_part = k_part.sum(2, keepdim=True) + k_state
        v_part = v_part.sum(2, keepdim=True) + decay.write(k) @ d_kv[rows]
        if da is not None:
            d_keep = decay.keep(d_kv[rows] * kv_in).sum(-1) + decay.keep(d_z[rows] * z_in).sum(-1)
            d_total = (k * k_state).sum(-2) + d_keep  # (B, H, 1, K)
            d_f = (q * q_part).sum(2) - (k * k_part).squeeze(2)  # (B, H, L, K)
            _add_decay_gradient(da, d_f, d_total.squeeze(2), start, end, scan.key_index)
        dq[:, :, :, start:end], dk[:, :, :, start:end], dv[:, :, :, start:end] = q_part, k_part, v_part
        q = decay.read(q)
        d_kv[rows] = decay.keep(d_kv[rows]) + (q.mT @ d_out).sum(2, keepdim=True)
        d_z[rows] = decay.keep(d_z[rows]) + (q.mT @ d_sum.unsqueeze(-1)).sum(2, keepdim=True)
    return Gradients(dq, dk, dv, da)


def _add_decay_gradient(da: Tensor, d_f: Tensor, d_total: Tensor, start: int, end: int, key_index: bool) -> None:
    """From potentials to the decays they sum: f_t holds a_t and all before it, or only those before."""
    if da.ndim < 4:
        d_f, d_total = d_f.sum(-1), d_total.sum(-1)
    later = d_f.flip(2).cumsum(2).flip(2)
    if key_index:
        later = later - d_f
    later = later + d_total.unsqueeze(2)
    if da.ndim == 1:
        da += later.sum((0, 2))
    else:
        da[:, :, start:end] = later
