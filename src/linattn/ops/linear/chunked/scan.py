"""The causal pass over chunks. Plain loops without autograd; ``library`` makes it one op with ``scan_backward``.

Inside a chunk the weights are a small matrix; between chunks the state carries everything. Memory beyond inputs and
outputs is one block of chunks with their states, and in the backward pass also one state per block, computed anew.
"""

from itertools import pairwise

import torch
from torch import Tensor

from linattn.ops.linear.chunked.blocks import Block, Scan
from linattn.ops.linear.chunked.decay import NoDecay


def forward(scan: Scan, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator ``(R, G, T, V)``, denominator ``(R, G, T, 1)``; updates states ``kv (.., K, V)``, ``z (.., K, 1)``."""
    shape = scan.q.shape[:3]
    num = torch.empty(*shape, scan.v.shape[2], dtype=scan.dtype, device=scan.q.device)
    den = torch.empty(*shape, 1, dtype=scan.dtype, device=scan.q.device)
    for block in scan.blocks():
        q, k, v = scan.tokens(block)
        decay = scan.decay(block)
        kv_in, z_in = advance(decay, block, k, v, kv, z)
        read = decay.read(q)
        block_num, block_den = scan.cut(num, block), scan.cut(den, block)
        torch.bmm(read, kv_in, out=block_num)
        torch.sum(read * z_in.mT, -1, keepdim=True, out=block_den)
        decay.attend(q, k, v, block_num, block_den)
        scan.put(block_num, num, block)
        scan.put(block_den, den, block)
    return num, den


def advance(decay: NoDecay, block: Block, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Move the states past the block, in place; returns those before each chunk, ``(N, K, V)`` and ``(N, K, 1)``."""
    k = decay.write(k)
    kv_in, z_in = States(block, kv), States(block, z)
    torch.bmm(k.mT, v, out=kv_in.gains)
    torch.sum(k, 1, keepdim=True, out=z_in.gains.mT)
    return kv_in.accumulate(decay.keep), z_in.accumulate(decay.keep)


class States:
    """The states before each chunk of a block, made in place from their gains: what each chunk adds.

    One buffer holds the gains one place late. So each gain of a row is where the state after it belongs, and the
    place before a row's gains, which got the last gain of the row before, is free for the state the row starts from.
    """

    def __init__(self, block: Block, state: Tensor) -> None:
        self.state = state[block.states]  # (R, K, V)
        rows = self.state.shape[0]
        buffer = torch.empty(rows * block.chunks + 1, *state.shape[1:], dtype=state.dtype, device=state.device)
        self.gains = buffer[1:]  # (N, K, V)
        self.last_gains = buffer[block.chunks :: block.chunks]
        self.before = buffer[:-1]

    def accumulate(self, keep: Tensor | None) -> Tensor:
        """``state <- keep state + gain``, chunk after chunk, with ``keep (R, M or 1, K or 1, 1)``."""
        last_gains = self.last_gains.clone()
        rows = self.before.unflatten(0, (self.state.shape[0], -1))
        rows[:, 0] = self.state
        each = rows.unbind(1)
        if keep is None:
            if rows.shape[3] == 1:
                rows.copy_(rows.cumsum(1))  # a narrow state: one slow sum is faster than many small ones
            else:
                for old, new in pairwise(each):
                    new.add_(old)
            torch.add(each[-1], last_gains, out=self.state)
        else:
            keeps = keep.expand(-1, len(each), -1, -1).unbind(1)
            for old, kept, new in zip(each, keeps, each[1:], strict=False):
                new.addcmul_(old, kept)
            torch.addcmul(last_gains, each[-1], keeps[-1], out=self.state)
        return self.before
