"""Places of tokens in rows without padding, after a state's tokens: index arithmetic that stays on the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.shared.types import LinearState


class Places:
    """Rows of real tokens without gaps after the latest R tokens of a state, with chunks at multiples of their size.

    ``start (B,)`` is the position of a row's first place; ``before`` and ``after (B,)`` are the lengths of the sequence
    in real tokens without and with the new ones.
    """

    def __init__(
        self, batch: int, length: int, key_mask: Tensor | None, before: Tensor | None, ring: int, chunk: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        zeros = torch.zeros(batch, dtype=torch.int64, device=device)
        self.before = zeros if before is None else before
        count = zeros + length if key_mask is None else key_mask.sum(-1)
        self.after = self.before + count
        self._plain = key_mask is None and before is None
        if self._plain:
            self.start = zeros
            self.real = torch.ones(batch, length, dtype=torch.bool, device=device)
            return
        size = length + (0 if before is None else ring + chunk)
        self.start = (self.before - ring).clamp(min=0).div(chunk, rounding_mode="floor") * chunk
        position = self.start[:, None] + torch.arange(size, device=device)
        self.real = (position >= self.before[:, None] - (0 if before is None else ring)) & (position >= 0)
        self.real &= position < self.after[:, None]
        self.old = position < self.before[:, None]
        nth = (position - self.before[:, None]).clamp(0, max(length - 1, 0))
        order = torch.arange(length, device=device).expand(batch, -1)
        rank = order
        if key_mask is not None:
            order = (~key_mask).to(torch.uint8).argsort(dim=-1, stable=True)
            rank = (key_mask.cumsum(-1) - 1).clamp(min=0)
        self._held = 0 if before is None else ring
        self._source = torch.where(self.old, position.remainder(ring), self._held + order.gather(1, nth))
        self._target = rank + (self.before - self.start)[:, None]
        self._key_mask = key_mask

    def gather(self, new: Tensor, held: Tensor | None = None) -> Tensor:
        """Put ``new (B, H, T, ...)`` into rows ``(B, H, S, ...)`` after ``held (B, H, R, ...)``; 0 where not real."""
        if self._plain:
            return new
        if self._held:
            held = new.new_zeros(*new.shape[:2], self._held, *new.shape[3:]) if held is None else held.to(new)
            new = torch.cat([held, new], 2)
        return blank(take(new, self._source[:, None].expand(-1, new.shape[1], -1)), ~self.real[:, None])

    def back(self, rows: Tensor) -> Tensor:
        """Take the tokens ``(B, H, T, ...)`` back out of rows; 0 at masked tokens."""
        if self._plain:
            return rows
        x = take(rows, self._target[:, None].expand(-1, rows.shape[1], -1))
        return x if self._key_mask is None else blank(x, ~self._key_mask[:, None])

    def is_old(self) -> Tensor | None:
        """``(B, S)``: which places hold tokens of the state; None: none do."""
        return None if self._plain or not self._held else self.old


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x (B, H, N, ...)`` at ``index (B, H, M)`` of its third axis."""
    if x.ndim == 3:
        return x.gather(2, index)
    return x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def blank(x: Tensor, where: Tensor, value: float = 0) -> Tensor:
    """``x (B, H, N, ...)`` with a value in the entries that ``where (B, 1 or H, N)`` marks."""
    return x.masked_fill(where if x.ndim == 3 else where.unsqueeze(-1), value)


def first_true(flags: Tensor, count: int) -> Tensor:
    """Indices of the first ``count`` True entries of the last axis, in order; if there are fewer, False ones follow."""
    return (~flags).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]


def whole_chunks(x: Tensor, chunk: int) -> Tensor:
    """``x (B, H, S, ...)`` with zeros appended up to a multiple of chunk."""
    more = -x.shape[2] % chunk
    if more == 0:  # padding by nothing is a copy
        return x
    return F.pad(x, (0, more) if x.ndim == 3 else (0, 0, 0, more))


def add(state: LinearState, features: Tensor, v: Tensor, where: Tensor) -> LinearState:
    """The sums with the tokens added that ``where (B, H_kv, N)`` marks."""
    features = features * where.unsqueeze(-1)
    return LinearState(state.kv + features.mT @ v, state.k + features.sum(2))
