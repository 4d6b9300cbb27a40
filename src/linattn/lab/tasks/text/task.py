"""The base class of sequence tasks, as training, evaluation and comparison use it, and the batches that they give."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import log
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.support.config import Config
from linattn.support.progress import OnWork, in_silence
from linattn.support.seeds import stream

Kind = Literal["causal", "classification", "masked"]
Sums = Mapping[str, float | Tensor]
T = TypeVar("T")
IGNORED = -100  # a target that is not scored; torch's own default of cross_entropy
FILES = ("data", "tokenizer")  # settings that name files
# Endings of texts, labelled examples and tokenizers. Other files of a folder, such as model weights, do not count.
ENDINGS = (".txt", ".jsonl", ".gz", ".npz", ".json", ".model", ".tiktoken")


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

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Sequences":
        return Sequences(**{name: function(value) for name, value in self.tensors().items()})

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
    columns = [part.tensors() for part in parts]
    return Sequences(**{name: torch.cat([column[name] for column in columns]) for name in columns[0]})


class once(cached_property[T]):  # noqa: N801  used like a keyword, as its parent is
    """``cached_property`` that never makes a value twice, though threads that prepare batches may ask at the same time.

    Each property has its own lock, as making one value may start threads that need another.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        super().__init__(make)
        self.making = RLock()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        with self.making:
            return super().__get__(instance, owner)


def shuffled_batch(total: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Indices ``(batch_size,)`` of batch ``step``: the set shuffled anew for each epoch, one epoch after another.

    Batches continue across the end of an epoch, so every batch is full and every epoch has each example once.

    Example:
        >>> first = [shuffled_batch(6, 4, seed=0, step=step) for step in range(3)]
        >>> sorted(torch.cat(first)[:6].tolist()), sorted(torch.cat(first)[6:].tolist())
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    """
    epoch, offset = divmod(step * batch_size, total)
    last = (offset + batch_size - 1) // total
    orders = [torch.randperm(total, generator=stream("order", seed, epoch + i)) for i in range(last + 1)]
    return torch.cat(orders)[offset : offset + batch_size]


def content_digest(places: Iterable[str | Path]) -> str:
    """Digest of files, or of the files in folders, by their names and their whole content."""
    found = hashlib.blake2b(digest_size=12)
    for place in places:
        path = Path(place).expanduser()
        in_folder = (file for file in path.glob("*") if file.suffix in ENDINGS and file.is_file())
        for file in [path] if path.is_file() else sorted(in_folder):
            name = "" if file == path else file.name  # a file given by itself may be renamed
            found.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                hashlib.file_digest(opened, lambda: found)
    return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SequenceTask(Config, ABC):
    """A task with endless training batches, fixed test batches, and a score for the logits of a model.

    A task is a config: its settings are fields, made by ``option``. Logits are ``(B, T, V)`` for causal and masked
    tasks, with V at least ``vocabulary``, and ``(B, classes)`` for classification.

    Attributes:
        name: the name in the registry.
        kind: "causal" (no token may see later ones), "classification", or "masked".
        metric: the entry of ``metrics`` by which models are compared; ``higher_is_better`` says which way.
        pooling: for classification, the vector that represents the sequence: "mean" or "last".
        classes: for classification, the width of the logits, 1 if the answer is a number.
        train_size: number of training sequences in an epoch; None if there is no end of them.
        bytes_per_token: for text, in the test part; None where bits per byte have no meaning.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    pooling: ClassVar[Literal["mean", "last"]] = "mean"

    @property
    def length(self) -> int:
        """Tokens of the longest sequence; of most tasks a setting."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """Token ids are below this number; of many tasks the setting ``vocab``."""
        return int(self.vocab)  # type: ignore[attr-defined]

    @property
    def classes(self) -> int | None:
        return None

    @property
    def train_size(self) -> int | None:
        return None

    @property
    def bytes_per_token(self) -> float | None:
        return None

    @once
    def content(self) -> str | None:
        """Digest of the files that sequences are read from, and of the tokenizer; None if sequences are drawn."""
        places = [place for name in FILES if (place := getattr(self, name, None))]
        return content_digest(places) if places else None

    def identity(self) -> dict[str, Any]:
        """What the sequences depend on, as JSON: the name, the settings, and what files hold, wherever these are."""
        known = {"name": self.name, "content": self.content, "length": self.length, "vocabulary": self.vocabulary}
        return known | {key: value for key, value in self.values(affecting=True).items() if key not in FILES}

    def prepare(self, on_work: OnWork = in_silence, *, train: bool = True, test: bool = True) -> None:
        """Make training and test data that takes long, which the first batches would otherwise make silently.

        Data that exists already is not made again. ``on_work`` is told what is being made.
        """

    @abstractmethod
    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        """Batch number ``step`` of an endless run; it depends on these three numbers alone."""

    @abstractmethod
    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of the test sequences, the same for every batch size; the last batch may be smaller."""

    def training_sums(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of ``logits (N, V)`` and ``targets (N,)``, in fp32, and the number of targets hit."""
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        return loss, (logits.detach().argmax(-1) == targets).sum()

    def loss(self, logits: Tensor, batch: Sequences) -> Tensor:
        """Mean cross-entropy over the scored targets, in nats and fp32, with gradients."""
        flat, targets = flattened(logits, batch)
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)

    def subsets(self, batch: Sequences) -> dict[str, Tensor]:
        """Masks in the shape of targets, of those whose accuracy is told by itself, by name."""
        return {}

    def answers(self, batch: Sequences) -> Tensor | None:
        """The number ``(B, T)``, up to T, of the answer in its row that each target belongs to, where answers count
        as a whole: ``exact_match``."""
        return None

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        """Sums that add up over batches, fp64 scalars on the device of the logits; ``metrics`` makes means of them.

        ``total`` counts scored targets, ``correct`` those that the largest logit hits, ``nats`` sums their
        cross-entropy. ``exact`` batches add ``legal`` (the largest logit has a chance above 0), ``distance``, the total
        variation between the softmax of the logits and the true distribution, and ``kl``, its divergence in nats.
        """
        flat, targets = flattened(logits, batch)
        scored = targets != IGNORED
        flat, targets = flat[scored].float(), targets[scored]
        best = flat.argmax(-1)
        hit = best == targets
        sums = {"total": scored.sum(), "correct": hit.sum()}
        sums["nats"] = F.cross_entropy(flat, targets, reduction="none").double().sum()
        for name, own in self.subsets(batch).items():
            mask = own.flatten()[scored]
            sums |= {f"total_{name}": mask.sum(), f"correct_{name}": (hit & mask).sum()}
        if batch.exact is not None:
            exact = F.pad(batch.exact, (0, flat.shape[-1] - batch.exact.shape[-1])).flatten(0, 1)[scored]
            hit = exact.gather(1, best[:, None])[:, 0] > 0
            entropy = -torch.special.xlogy(exact, exact).double().sum()
            sums["legal"] = hit.sum()
            sums["distance"] = (flat.softmax(-1) - exact).abs().double().sum() / 2
            sums["kl"] = -(exact * flat.log_softmax(-1)).double().sum() - entropy
        if (answers := self.answers(batch)) is not None:
            wrong = scored.masked_scatter(scored, ~hit).view_as(answers)
            counts = torch.zeros(2, len(answers), answers.shape[1] + 1, dtype=torch.int64, device=answers.device)
            for count, flags in zip(counts, (scored.view_as(answers), wrong), strict=True):
                count.scatter_add_(1, answers, flags.long())
            sums |= {"answers": (counts[0] > 0).sum(), "right": ((counts[0] > 0) & (counts[1] == 0)).sum()}
        return {name: value.double() for name, value in sums.items()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Means from the sums of all batches: ``loss`` in nats, ``accuracy`` in percent, and those that a task adds."""
        means = {"loss": mean(sums, "nats"), "accuracy": percent(sums, "correct")}
        if "legal" in sums:
            means |= {"legal": percent(sums, "legal"), "distance": mean(sums, "distance"), "kl": mean(sums, "kl")}
        if "answers" in sums:
            means["exact_match"] = percent(sums, "right", "answers")
        if self.bytes_per_token is not None:
            means["bits_per_byte"] = means["loss"] / log(2) / self.bytes_per_token
        names = [name.removeprefix("total_") for name in sums if name.startswith("total_")]
        return means | {f"accuracy_{name}": percent(sums, f"correct_{name}", f"total_{name}") for name in names}


def mean(sums: Sums, part: str, whole: str = "total", factor: float = 1) -> float:
    """The sum ``part`` by the sum ``whole``, which may be 0."""
    return factor * float(sums[part]) / max(float(sums[whole]), 1.0)


def percent(sums: Sums, part: str, whole: str = "total") -> float:
    return mean(sums, part, whole, 100)


def flattened(logits: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
    """Logits ``(N, V)`` and targets ``(N,)`` of all places, scored or not."""
    targets = batch.targets
    # Only for one vector with several answers, (B, P V), the targets have more axes than the logits before V.
    shared = logits.ndim - 1
    if logits.shape[:shared] != targets.shape[:shared] or logits.numel() % max(targets.numel(), 1):
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    return logits.reshape(*targets.shape, -1).flatten(0, -2), targets.flatten()
