"""Memory and speed of decoding, by the number of tokens that came before."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from linattn.convert.evaluate.quiet import quiet


@dataclass(frozen=True)
class DecodingRow:
    """Figures of decoding after one context.

    Attributes:
        cache_bytes: memory of all tensors in the cache, over all layers and sequences.
        tokens_per_second: tokens decoded per second over all sequences, from the median step.
        read_seconds: time to read from the first token up to this context, without the timed steps.
    """

    context: int
    batch: int
    cache_bytes: int
    tokens_per_second: float
    read_seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def decoding(
    model: Any,
    contexts: Sequence[int],
    *,
    text: Sequence[int] | Tensor | None = None,
    batch: int = 1,
    steps: int = 16,
    piece: int = 1024,
    seconds: float = float("inf"),
    seed: int = 0,
    progress: Callable[[DecodingRow], None] | None = None,
) -> list[DecodingRow]:
    """Read one long sequence in pieces; at each context, stop and decode ``steps`` tokens greedily.

    The tokens that were decoded are part of the next context. Once ``seconds`` have passed, no new context is begun.

    Args:
        model: causal, from ids and ``past_key_values`` to ``logits`` and ``past_key_values``.
        text: ids to read, repeated as often as needed; None: random ids, drawn with ``seed``.
        piece: tokens that are read at a time.
    """
    if steps < 2:
        raise ValueError(f"steps must be an integer >= 2, the first is not counted, got {steps}")
    rows: list[DecodingRow] = []
    begun = perf_counter()
    with quiet(model) as device:
        reader = _Reader(model, _endless(model, text, seed), batch, piece, device)
        for context in sorted(set(contexts)):
            if context < reader.length + 1:
                raise ValueError(f"contexts must be more than {steps} tokens apart, got {list(contexts)}")
            if perf_counter() - begun > seconds:
                break
            reader.read(context)
            cache_bytes = bytes_of(reader.cache)
            times = [reader.step() for _ in range(steps)][1:]
            median = sorted(times)[len(times) // 2]
            rows.append(DecodingRow(context, batch, cache_bytes, batch / median, reader.seconds))
            if progress is not None:
                progress(rows[-1])
    return rows


class _Reader:
    """A model's cache, how many tokens it has read and how long that took."""

    def __init__(self, model: Any, text: Tensor, batch: int, piece: int, device: torch.device) -> None:
        self.model, self.text, self.batch, self.piece, self.device = model, text, batch, piece, device
        self.cache: Any = None
        self.length = 0
        self.seconds = 0.0
        self.next = torch.zeros(batch, 1, dtype=torch.long, device=device)

    def read(self, context: int) -> None:
        begun = perf_counter()
        while self.length < context:
            count = min(self.piece, context - self.length)
            places = torch.arange(self.length, self.length + count) % len(self.text)
            self._call(self.text[places].to(self.device).expand(self.batch, -1))
        self._wait()
        self.seconds += perf_counter() - begun

    def step(self) -> float:
        """Decode one token; returns the seconds it took."""
        self._wait()
        begun = perf_counter()
        self._call(self.next)
        self._wait()
        return perf_counter() - begun

    def _call(self, ids: Tensor) -> None:
        found = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = found.past_key_values
        self.next = found.logits[:, -1:].argmax(-1)
        self.length += ids.shape[1]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _endless(model: Any, text: Sequence[int] | Tensor | None, seed: int) -> Tensor:
    if text is not None:
        return torch.as_tensor(text, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (4096,), generator=generator)


def bytes_of(holder: Any) -> int:
    """Memory of all tensors reachable from an object; views count once, and with all the memory they keep alive.

    Example:
        >>> import torch
        >>> x = torch.zeros(8)
        >>> bytes_of({"a": x, "b": [x[:2], torch.zeros(2, dtype=torch.float64)]})
        48
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    left = [holder]
    while left:
        part = left.pop()
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif id(part) not in seen and not isinstance(part, type | str | bytes | torch.nn.Module):
            seen.add(id(part))
            if isinstance(part, dict):
                left += part.values()
            elif isinstance(part, list | tuple | set):
                left += part
            elif hasattr(part, "__dict__"):
                left += vars(part).values()
    return sum(storages.values())
