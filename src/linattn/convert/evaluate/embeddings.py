"""Embeddings of encoders: mean-pooled sentence vectors, compared to the teacher's and used for a linear probe."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.convert.evaluate.quiet import quiet
from linattn.support.extras import need


def sentence_vectors(
    model: Any, tokenizer: Any, sentences: Sequence[str], *, batch_size: int = 32, length: int = 256
) -> Tensor:
    """Mean of the last hidden states over the tokens of each sentence: ``(sentences, hidden)``, fp32, on the CPU.

    Sentences are cut to ``length`` tokens and batched by their length; the vectors come in the order of the sentences.
    """
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found: list[Tensor] = []
    body = getattr(model, "base_model", model)
    with quiet(model) as device:
        for start in range(0, len(order), batch_size):
            texts = [sentences[i] for i in order[start : start + batch_size]]
            given = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
            hidden = body(**given).last_hidden_state.float()
            real = given["attention_mask"].unsqueeze(-1).float()
            found.append(((hidden * real).sum(1) / real.sum(1).clamp(min=1)).cpu())
    vectors = torch.empty(len(order), found[0].shape[1])
    vectors[torch.tensor(order)] = torch.cat(found)
    return vectors


@dataclass(frozen=True)
class Agreement:
    """Cosines of two models' vectors of the same sentences."""

    mean: float
    tenth: float
    least: float
    count: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def agreement(student: Tensor, teacher: Tensor) -> Agreement:
    """Cosine similarity sentence by sentence: its mean, its 10th percentile and its minimum.

    Example:
        >>> import torch
        >>> agreement(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])).mean
        1.0
    """
    cosines = F.cosine_similarity(student.double(), teacher.double(), dim=-1)
    return Agreement(float(cosines.mean()), float(cosines.quantile(0.1)), float(cosines.min()), len(cosines))


def sentences_of(texts: Sequence[str], count: int, *, least: int = 6, most: int = 60) -> list[str]:
    """Up to ``count`` sentences of ``least`` to ``most`` words, taken from the texts in equal numbers.

    Example:
        >>> sentences_of(["One two three. Four five six. Seven.", "Eight nine ten eleven!"], 2, least=3)
        ['One two three.', 'Eight nine ten eleven!']
    """
    own = []
    for text in texts:
        parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+", text)]
        own.append([part for part in parts if least <= len(part.split()) <= most])
    found: list[str] = []
    for turn in range(max(map(len, own), default=0)):
        found += [parts[turn] for parts in own if turn < len(parts)]
    return found[:count]


def probe(train: Tensor, train_labels: Sequence[int], test: Tensor, test_labels: Sequence[int]) -> float:
    """Accuracy, in percent, of a logistic regression on standardised vectors."""
    need("the linear probe", "sklearn")
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    mean, std = train.mean(0), train.std(0).clamp(min=1e-6)
    fitted = LogisticRegression(max_iter=1000, C=0.1).fit(((train - mean) / std).numpy(), list(train_labels))
    return 100 * float(fitted.score(((test - mean) / std).numpy(), list(test_labels)))
