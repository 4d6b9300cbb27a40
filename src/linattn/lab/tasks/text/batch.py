"""Batches of sequences, as tasks give them to models."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

IGNORED = -100  # a target that is not scored; torch's own default of cross_entropy


@dataclass(frozen=True, eq=False)
class Sequences:
    """A batch of B sequences of T tokens.

    Attributes:
        inputs: token ids ``(B, T)``, int64.
        targets: ``(B, T)`` for causal and masked tasks: ``targets[b, t]`` is what ``logits[b, t]`` should predict
            (already shifted), ``IGNORED`` where nothing is scored. For classification ``(B,)``, or ``(B, P)`` for P
            answers from one vector.
        key_mask: ``(B, T)`` bool, True = real token; None if nothing is padded.
        exact: ``(B, T, vocabulary)`` fp32, the true distribution of the next token, if the task knows it.
        cu_seqlens: offsets ``(N + 1,)`` of N pieces laid end to end in one row, B = 1; None if each row is a sequence.
    """

    inputs: Tensor
    targets: Tensor
    key_mask: Tensor | None = None
    exact: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Sequences":
        values = (getattr(self, field.name) for field in fields(self))
        return Sequences(*(None if value is None else function(value) for value in values))  # type: ignore[arg-type]

    def take(self, rows: Tensor | slice) -> "Sequences":
        """The batch with only these rows."""
        if self.cu_seqlens is not None:
            raise ValueError("pieces laid end to end in one row cannot be taken apart by row")
        return self._map(lambda value: value[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Sequences":
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Sequences":
        return self._map(lambda value: value.pin_memory())


def join(parts: Iterable[Sequences]) -> Sequences:
    """Concatenate batches of the same shape."""
    columns = zip(*((p.inputs, p.targets, p.key_mask, p.exact) for p in parts), strict=True)
    return Sequences(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]
