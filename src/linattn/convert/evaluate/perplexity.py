"""Perplexity over windows of fixed length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from linattn.convert.evaluate.quiet import quiet

ROWS = 2**25  # logits converted to fp32 at once: 128 MiB


@dataclass(frozen=True)
class Perplexity:
    """``exp(nats / tokens)``, the mean over all predicted tokens of all windows.

    ``windows``: ``(nats, predicted tokens)`` of each window of ``length`` tokens, in order, so that two models that saw
    the same windows can be compared window by window.
    """

    length: int
    windows: list[tuple[float, int]]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.windows)

    @property
    def nats(self) -> float:
        """Mean loss per token, in nats."""
        return sum(nats for nats, _ in self.windows) / self.tokens

    @property
    def perplexity(self) -> float:
        return exp(min(self.nats, 700.0))  # larger exponents overflow

    def as_dict(self) -> dict[str, Any]:
        return {"length": self.length, "perplexity": self.perplexity, "nats": self.nats, "tokens": self.tokens,
                "windows": [nats / tokens for nats, tokens in self.windows]}  # fmt: skip


def perplexity(
    model: Any, texts: Sequence[Tensor | Sequence[int]], length: int, *, windows: int | None = None, batch_size: int = 1
) -> Perplexity:
    """Cut each text into windows of ``length`` tokens; each token is predicted from those before it in its window.

    The first token of a window is given, not predicted: nothing comes before it. Windows do not overlap. The last one
    of a text may be shorter, and is left out if it has a single token.

    Args:
        model: from ids ``(B, T)`` to an output with ``logits (B, T, vocabulary)``.
        texts: token ids of each text, ``(n,)``.
        length: tokens of a window, at least 2.
        windows: at most so many windows of each text, from its start; None: all.
        batch_size: windows that the model sees at once; since the model is causal, shorter ones can be padded.
    """
    if length < 2:
        raise ValueError(f"length must be an integer >= 2, got {length}")
    rows: list[tuple[float, int]] = []
    with quiet(model) as device:
        for batch in _batches(texts, length, windows, batch_size):
            ids, sizes = pad_sequence(batch, batch_first=True).to(device), [len(window) - 1 for window in batch]
            losses = token_losses(model(ids, use_cache=False).logits[:, :-1], ids[:, 1:])
            real = torch.arange(losses.shape[1]) < torch.tensor(sizes)[:, None]
            losses = losses.masked_fill(~real.to(device), 0)
            rows += zip(losses.sum(-1, dtype=torch.float64).tolist(), sizes, strict=True)
    if not rows:
        raise ValueError("texts must hold at least one of two tokens, got none")
    return Perplexity(length, rows)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target, in nats: logits ``(B, T, vocabulary)``, targets ``(B, T)`` -> ``(B, T)`` in fp32.

    Rows are processed in parts: an fp32 copy of all logits of a long window would be the largest tensor of the run.
    """
    rows, wanted = logits.flatten(0, 1), targets.flatten()
    count = max(1, ROWS // rows.shape[-1])
    parts = [
        F.cross_entropy(some.float(), ids, reduction="none")
        for some, ids in zip(rows.split(count), wanted.split(count), strict=True)
    ]
    return torch.cat(parts).view(targets.shape)


def _batches(
    texts: Sequence[Tensor | Sequence[int]], length: int, windows: int | None, batch_size: int
) -> Iterator[list[Tensor]]:
    """Windows in the order of the texts."""
    batch: list[Tensor] = []
    for text in texts:
        ids = torch.as_tensor(text, dtype=torch.long)
        for window in ids[: None if windows is None else windows * length].split(length):
            if len(window) > 1:
                batch.append(window)
            if len(batch) == batch_size:
                yield batch
                batch = []
    if batch:
        yield batch


def gain(worse: Perplexity, better: Perplexity) -> tuple[float, float]:
    """How many nats per token ``better`` is below ``worse``, and the standard error of this gain over windows.

    Both must have seen the same windows: differences within a window vary far less than the windows themselves.

    Example:
        >>> gain(Perplexity(8, [(7.0, 7), (14.0, 7)]), Perplexity(8, [(3.5, 7), (10.5, 7)]))
        (0.5, 0.0)
    """
    tokens = [count for _, count in better.windows]
    if tokens != [count for _, count in worse.windows]:
        raise ValueError("worse and better must have seen the same windows")
    mean = worse.nats - better.nats
    if len(tokens) < 2:
        return mean, float("inf")  # one window says nothing about the spread
    differences = [(a - b) / n for (a, n), (b, _) in zip(worse.windows, better.windows, strict=True)]
    variance = sum(n * (d - mean) ** 2 for n, d in zip(tokens, differences, strict=True)) / sum(tokens)
    return mean, sqrt(variance / (len(differences) - 1))
