"""The base class of sequence tasks, as training, evaluation and comparison use it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from math import log
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.content import content_digest
from linattn.lab.tasks.text.once import once
from linattn.support.telling import OnWork, in_silence

Kind = Literal["causal", "classification", "masked"]
FILES = ("data", "tokenizer")  # settings that name files
PLACES = ("cache",)  # settings that say where a task keeps data, not what the data is


class SequenceTask(ABC):
    """A task with endless training batches, fixed test batches, and a score for the logits of a model.

    Logits are ``(B, T, V)`` for causal and masked tasks, with V at least ``vocabulary``, and ``(B, classes)`` for
    classification. ``targets[b, t]`` belongs to ``logits[b, t]``: targets are already shifted.

    Attributes:
        name: the name in the registry.
        kind: "causal" (no token may see later ones), "classification", or "masked".
        metric: the entry of ``metrics`` by which models are compared; ``higher_is_better`` says which way.
        pooling: for classification, the vector that represents the sequence: "mean" or "last".
        vocabulary: token ids are below this number.
        classes: width of the logits for classification, 1 if the answer is a number; None for other kinds.
        length: tokens of the longest sequence.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    pooling: ClassVar[Literal["mean", "last"]] = "mean"
    # Settings without a default, and a description of what they may be.
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({})
    length: int

    @property
    @abstractmethod
    def vocabulary(self) -> int: ...

    @property
    def classes(self) -> int | None:
        return None

    def prepare(self, on_work: OnWork = in_silence, *, train: bool = True, test: bool = True) -> None:  # noqa: B027
        """Make training and test data that takes long, which the first batches would otherwise make silently.

        Data that exists already is not made again. ``on_work`` is told what is being made.
        """

    @once
    def content(self) -> str | None:
        """Digest of the files that sequences are read from, and of the tokenizer; None if sequences are drawn."""
        places = [place for name in FILES if (place := getattr(self, name, None))]
        return content_digest(places) if places else None

    @property
    def train_size(self) -> int | None:
        """Number of training sequences in an epoch; None if there is no end of them."""
        return None

    @abstractmethod
    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        """Batch number ``step``; it depends on these three numbers alone."""

    def train_batches(self, batch_size: int, seed: int, start: int = 0) -> Iterator[Sequences]:
        """Batches ``start, start + 1, ...`` without end; those before ``start`` are not made."""
        return (self.train_batch(batch_size, seed, step) for step in count(start))

    @abstractmethod
    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of the test sequences, the same for every batch size; the last batch may be smaller."""

    def training_sums(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of ``logits (N, V)`` and ``targets (N,)``, in fp32, and the number of targets hit."""
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        return loss, (logits.detach().argmax(-1) == targets).sum()

    def loss(self, logits: Tensor, batch: Sequences) -> Tensor:
        """Mean cross-entropy over the scored targets, in nats and fp32, with gradients."""
        flat, targets = self._rows(logits, batch)
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        """Sums that add up over batches, fp64 scalars on the device of the logits; ``metrics`` makes means of them.

        ``total`` counts scored targets, ``correct`` those that the largest logit hits, ``nats`` sums their
        cross-entropy. ``exact`` batches add ``legal`` (the largest logit has a chance above 0) and ``distance``, the
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
        """Means from the sums of all batches: ``loss`` in nats, ``accuracy`` in percent, and those that a task adds."""
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
        """For text: bytes per token in the test part; None where bits per byte have no meaning."""
        return None

    def _rows(self, logits: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
        """Logits ``(N, V)`` and targets ``(N,)`` of all places, scored or not."""
        targets = batch.targets
        # Only for one vector with several answers, (B, P V), the targets have more axes than the logits before V.
        shared = logits.ndim - 1
        if logits.shape[:shared] != targets.shape[:shared] or logits.numel() % max(targets.numel(), 1):
            raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
        return logits.reshape(*targets.shape, -1).flatten(0, -2), targets.flatten()
