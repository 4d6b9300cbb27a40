"""What training, evaluation and comparison know of a sequence task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from math import log
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.support.telling import OnWork, in_silence
from linattn.tasks.text.batch import IGNORED, Sequences
from linattn.tasks.text.content import content_digest
from linattn.tasks.text.once import once

Kind = Literal["causal", "classification", "masked"]
FILES = ("data", "tokenizer")  # settings that name files
PLACES = ("cache",)  # settings that say where a task keeps things, not what it is


class SequenceTask(ABC):
    """Batches to train on without end, the same ones to test on every time, and the score of an answer.

    Logits are ``(B, T, V)`` for causal and masked tasks, ``(B, classes)`` for classification, V at least
    ``vocabulary``. ``targets[b, t]`` belongs to ``logits[b, t]``: nothing is left to shift.

    Attributes:
        name: how it is registered.
        kind: "causal" (no token may see later ones), "classification", or "masked".
        metric: the entry of ``metrics`` that compares models; ``higher_is_better`` says which way.
        pooling: for classification, which vector stands for the sequence: "mean" or "last".
        vocabulary: token ids are below it.
        classes: width of the logits of a classification, 1 for a number; else None.
        length: tokens of the longest sequence.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    pooling: ClassVar[Literal["mean", "last"]] = "mean"
    # Settings without a default, and what they may be.
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({})
    length: int

    @property
    @abstractmethod
    def vocabulary(self) -> int: ...

    @property
    def classes(self) -> int | None:
        return None

    def prepare(self, on_work: OnWork = in_silence, *, train: bool = True, test: bool = True) -> None:  # noqa: B027
        """Make what takes long and the first batches would make without a word, of training and of test sequences.

        What is there already is not made again.
        """

    @once
    def content(self) -> str | None:
        """Digest of the files that sequences are read from, and of a tokenizer; None where sequences are drawn."""
        places = [place for name in FILES if (place := getattr(self, name, None))]
        return content_digest(places) if places else None

    @property
    def train_size(self) -> int | None:
        """Training sequences of an epoch; None where there is no end of them."""
        return None

    @abstractmethod
    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        """Batch number ``step``, from these three numbers alone."""

    def train_batches(self, batch_size: int, seed: int, start: int = 0) -> Iterator[Sequences]:
        """Batches ``start, start + 1, ...`` without end; none before ``start`` is made."""
        return (self.train_batch(batch_size, seed, step) for step in count(start))

    @abstractmethod
    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """The same test sequences every time, however many go into a batch; the last batch may be smaller."""

    def training_sums(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``logits (N, V)`` and ``targets (N,)``: the summed loss, in fp32, and how many are hit."""
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        return loss, (logits.detach().argmax(-1) == targets).sum()

    def loss(self, logits: Tensor, batch: Sequences) -> Tensor:
        """Mean cross-entropy in nats over the scored targets, in fp32; gradients flow."""
        flat, targets = self._rows(logits, batch)
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        """Sums, fp64 scalars on the device of the logits, that add up over batches; ``metrics`` makes means of them.

        ``total`` counts scored targets, ``correct`` those that the largest logit hits, ``nats`` sums their
        cross-entropy. ``exact`` batches add ``legal`` (the largest logit has a chance at all) and ``distance``, the
        total variation between the softmax of the logits and the true distribution.
        """
        flat, targets = self._rows(logits, batch)
        scored = targets != IGNORED
        flat, targets = flat[scored].float(), targets[scored]
        best = flat.argmax(-1)
        sums = {
            "total": scored.sum(),
            "correct": (best == targets).sum(),
            "nats": F.cross_entropy(flat, targets, reduction="none").double().sum(),
        }
        if batch.exact is not None:
            exact = F.pad(batch.exact, (0, flat.shape[-1] - batch.exact.shape[-1])).flatten(0, 1)[scored]
            sums["legal"] = (exact.gather(1, best[:, None]) > 0).sum()
            sums["distance"] = (flat.softmax(-1) - exact).abs().double().sum() / 2
        return {name: value.double() for name, value in sums.items()}

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Means from the sums of all batches: ``loss`` in nats, ``accuracy`` in percent, and what a task adds."""
        total = max(float(sums["total"]), 1.0)
        means = {"loss": float(sums["nats"]) / total, "accuracy": 100 * float(sums["correct"]) / total}
        if "legal" in sums:
            means["legal"] = 100 * float(sums["legal"]) / total
            means["distance"] = float(sums["distance"]) / total
        if self.bytes_per_token is not None:
            means["bits_per_byte"] = means["loss"] / log(2) / self.bytes_per_token
        return means

    @property
    def bytes_per_token(self) -> float | None:
        """For text: bytes of the test part for each of its tokens; None where bits per byte mean nothing."""
        return None

    def _rows(self, logits: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
        """Logits ``(N, V)`` and targets ``(N,)`` of every place that could be scored."""
        targets = batch.targets
        # One vector for several answers, (B, P V), is the only case in which the targets have more axes before V.
        shared = logits.ndim - 1
        if logits.shape[:shared] != targets.shape[:shared] or logits.numel() % max(targets.numel(), 1):
            raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
        return logits.reshape(*targets.shape, -1).flatten(0, -2), targets.flatten()
