"""How a pass is divided: chunks of tokens, and blocks of chunks that are computed at once."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.linear.chunked.channel_decay import ChannelDecay
from linattn.ops.linear.chunked.decay import NoDecay, ScalarDecay

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
        found = []
        for n, (first, end) in enumerate(pairwise(bounds)):
            height = max(1, most // max(1, end - first))
            for row in range(0, count, height):
                rows = slice(row, min(row + height, count))
                states = slice(rows.start + n * count, rows.stop + n * count)
                start = first
                while start < end:
                    size = min(self.chunk, end - start)
                    chunks = min(most // size, (end - start) // size)
                    found.append(Block(rows, states, start, start + chunks * size, chunks))
                    start += chunks * size
        return found

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
            return NoDecay(block.length, self.strict)
        if a.shape[1] == 1 != self.k.shape[1]:
            a = a[block.rows, :, None].expand(-1, 1, block.length)
        else:
            a = a[block.rows, block.start : block.end].unflatten(1, (block.chunks, block.length))
        kind = ScalarDecay if a.ndim == 3 else ChannelDecay
        return kind(a, block.chunks, self.key_index, self.strict, self.dtype)
