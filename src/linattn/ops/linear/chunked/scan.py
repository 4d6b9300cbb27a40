"""The causal pass over chunks and its gradient: plain loops without autograd, which ``sums`` makes one operator.

Inside a chunk the weights are a small matrix; between chunks the state carries everything. Memory beyond inputs and
outputs is one block of chunks with their states, and in the backward pass also one state per block, computed anew.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.linear.chunked.decay import ChannelDecay, NoDecay, ScalarDecay

# Numbers of a (tokens, features) matrix that is computed with at once. CPU: enough for the matrix products, few enough
# for the cache. Elsewhere each step is a launch, so fewer and larger blocks are better.
_BLOCK_NUMBERS = {"cpu": 1 << 19, "other": 1 << 25}


class Block(NamedTuple):
    """Equal chunks of some rows. A row is one sequence and key head: a matrix of keys, one of values, one state."""

    rows: slice  # of the inputs
    states: slice  # of the state, which has rows for each packed sequence
    start: int
    end: int
    chunks: int

    @property
    def length(self) -> int:
        return (self.end - self.start) // self.chunks


class Scan(NamedTuple):
    """The inputs of a pass by rows: q ``(R, G, T, K)``, k ``(R, T, K)``, v ``(R, T, V)``.

    The G query heads of a row share its keys. ``log_decay`` is None, ``(R, T)``, ``(R, 1)`` or ``(R, T, K)``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    cu_seqlens: Tensor | None
    chunk: int
    key_index: bool
    strict: bool
    dtype: torch.dtype

    def blocks(self) -> list[Block]:
        """The blocks, in order of time for every row: several whole rows if they are short, else long parts of one row.

        Either way a block of contiguous inputs is a batch of matrices without a copy.
        """
        count, length, features = self.k.shape
        numbers = _BLOCK_NUMBERS["cpu" if self.k.device.type == "cpu" else "other"]
        most = max(self.chunk, numbers // max(1, features, self.v.shape[2]))  # tokens
        bounds = [0, length] if self.cu_seqlens is None else self.cu_seqlens.tolist()
        blocks = []
        for n, (first, end) in enumerate(pairwise(bounds)):
            height = max(1, most // max(1, end - first))
            for row in range(0, count, height):
                rows = slice(row, min(row + height, count))
                states = slice(rows.start + n * count, rows.stop + n * count)
                start = first
                while start < end:
                    size = min(self.chunk, end - start)
                    chunks = min(most // size, (end - start) // size)
                    blocks.append(Block(rows, states, start, start + chunks * size, chunks))
                    start += chunks * size
        return blocks

    def cut(self, x: Tensor, block: Block) -> Tensor:
        """The block of ``x (R, T, D)`` as ``(N, L, D)``, or of ``(R, G, T, D)`` as ``(N, G L, D)``, row by row."""
        x = x[block.rows, ..., block.start : block.end, :].to(self.dtype)
        x = x.unflatten(-2, (block.chunks, block.length)).movedim(-3, 1)
        return x.reshape(x.shape[0] * block.chunks, x.shape[2:-1].numel(), x.shape[-1])

    def put(self, part: Tensor, whole: Tensor, block: Block) -> None:
        """The reverse of ``cut``. If ``cut`` gave a view, what was written to it is in place already."""
        if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            return
        place = whole[block.rows, ..., block.start : block.end, :]
        place = place.unflatten(-2, (block.chunks, block.length)).movedim(-3, 1)
        place.copy_(part.view(place.shape))

    def tokens(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        return self.cut(self.q, block), self.cut(self.k, block), self.cut(self.v, block)

    def decay(self, block: Block) -> NoDecay:
        a = self.log_decay
        if a is None:
            return NoDecay(block.length, block.chunks, self.strict)
        kind = ScalarDecay if a.ndim == 2 else ChannelDecay
        a = a.unsqueeze(-1) if a.ndim == 2 else a
        if a.shape[1] == 1 != self.k.shape[1]:
            a = a[block.rows, :, None].expand(-1, 1, block.length, -1)
        else:
            a = a[block.rows, block.start : block.end].unflatten(1, (block.chunks, block.length))
        return kind(a, block.chunks, self.key_index, self.strict, self.dtype)


def forward(scan: Scan, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator ``(R, G, T, V)``, denominator ``(R, G, T, 1)``; updates states ``kv (.., K, V)``, ``z (.., K, 1)``."""
    shape = scan.q.shape[:3]
    num = torch.empty(*shape, scan.v.shape[2], dtype=scan.dtype, device=scan.q.device)
    den = torch.empty(*shape, 1, dtype=scan.dtype, device=scan.q.device)
    for block in scan.blocks():
        q, k, v = scan.tokens(block)
        decay = scan.decay(block)
        kv_in, z_in = advance(decay, block, k, v, kv, z)
        read = decay.times(q, decay.reading)
        block_num, block_den = scan.cut(num, block), scan.cut(den, block)
        torch.bmm(read, kv_in, out=block_num)
        torch.sum(read * z_in.mT, -1, keepdim=True, out=block_den)
        decay.attend(q, k, v, block_num, block_den)
        scan.put(block_num, num, block)
        scan.put(block_den, den, block)
    return num, den


def advance(decay: NoDecay, block: Block, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Move the states past the block, in place; returns those before each chunk, ``(N, K, V)`` and ``(N, K, 1)``."""
    k = decay.times(k, decay.writing)
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


def backward(
    scan: Scan, kv: Tensor, z: Tensor, d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and log_decay; ``d_kv`` and ``d_z`` of the final state become those of the initial state.

    The decay's gradient needs no score matrix: through the potentials it is ``q.dq - k.dk`` token by token, plus
    the effect of the chunk's total decay on the state.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in scan[:3])
    a = scan.log_decay
    da = None if a is None else torch.zeros(a.shape, dtype=scan.dtype, device=a.device)
    blocks = scan.blocks()
    starts = []
    for block in blocks:
        starts.append((kv[block.states].clone(), z[block.states].clone()))
        advance(scan.decay(block), block, scan.cut(scan.k, block), scan.cut(scan.v, block), kv, z)
    for block in reversed(blocks):
        kv[block.states], z[block.states] = starts.pop()
        q, k, v = scan.tokens(block)
        decay = scan.decay(block)
        kv_in, z_in = advance(decay, block, k, v, kv, z)
        d_out, d_sum = scan.cut(d_num, block), scan.cut(d_den, block)
        d_kv_out, d_z_out = _retreat(decay, block, decay.times(q, decay.reading), d_out, d_sum, d_kv, d_z)
        q_part, k_part, v_part = decay.pull_back(q, k, v, d_out, d_sum)
        q_part += decay.times(torch.bmm(d_out, kv_in.mT).addcmul_(d_sum, z_in.mT), decay.reading)
        k_state = decay.times(torch.baddbmm(d_z_out.mT, v, d_kv_out.mT), decay.writing)
        k_part += k_state
        v_part.baddbmm_(decay.times(k, decay.writing), d_kv_out)
        if da is not None:
            d_keep = decay.kept((d_kv_out * kv_in).sum(-1) + (d_z_out * z_in).squeeze(-1))
            d_total = (k * k_state).sum(1) + d_keep  # (N, K)
            d_f = (q * q_part).view(k.shape[0], -1, *k.shape[1:]).sum(1) - k * k_part  # (N, L, K)
            _add_decay_gradient(da, d_f, d_total, block, scan.key_index)
        scan.put(q_part, dq, block)
        scan.put(k_part, dk, block)
        scan.put(v_part, dv, block)
    return dq, dk, dv, da


def _retreat(
    decay: NoDecay, block: Block, read: Tensor, d_out: Tensor, d_sum: Tensor, d_kv: Tensor, d_z: Tensor
) -> tuple[Tensor, Tensor]:
    """Move the state's gradient before the block, in place; returns the gradients of the state after each chunk."""
    keep = None if decay.keep is None else decay.keep.flip(1)

    def reverse(x: Tensor) -> Tensor:
        """The chunks of each row in reverse."""
        return x.unflatten(0, (-1, block.chunks)).flip(1).flatten(0, 1)

    d_kv_out, d_z_out = States(block, d_kv), States(block, d_z)
    read = reverse(read).mT
    torch.bmm(read, reverse(d_out), out=d_kv_out.gains)
    torch.bmm(read, reverse(d_sum), out=d_z_out.gains)
    return reverse(d_kv_out.accumulate(keep)), reverse(d_z_out.accumulate(keep))


def _add_decay_gradient(da: Tensor, d_f: Tensor, d_total: Tensor, block: Block, key_index: bool) -> None:
    """Add decay gradients from those of potentials: f_t sums the decays of its chunk up to t, or only those before."""
    if da.ndim == 2:
        d_f, d_total = d_f.sum(-1), d_total.sum(-1)
    later = d_f.flip(1).cumsum(1).flip(1)
    if key_index:
        later = later - d_f
    later = (later + d_total.unsqueeze(1)).view(-1, block.end - block.start, *later.shape[2:])
    if da.shape[1] == 1:
        da[block.rows] += later.sum(1, keepdim=True)
    else:
        da[block.rows, block.start : block.end] = later
