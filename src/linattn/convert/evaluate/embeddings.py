"""Embeddings of encoders: mean-pooled sentence vectors, compared to the teacher's and used for a linear probe."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.convert.training.loop import quiet
from linattn.support.extras import need


def sentence_vectors(
    model: Any, tokenizer: Any, sentences: Sequence[str], *, batch_size: int = 32, length: int = 256
) -> Tensor:
    """Mean of the last hidden states over the tokens of each sentence: ``(sentences, hidden)``, fp32, on the CPU.

    Sentences are cut to ``length`` tokens and batched by their length; the vectors come in the order of the sentences.
    """
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    parts: list[Tensor] = []
    body = getattr(model, "base_model", model)
    with quiet(model) as device:
        for start in range(0, len(order), batch_size):
            texts = [sentences[i] for i in order[start : start + batch_size]]
            given = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
            hidden = body(**given).last_hidden_state.float()
            real = given["attention_mask"].unsqueeze(-1).float()
            parts.append(((hidden * real).sum(1) / real.sum(1).clamp(min=1)).cpu())
    vectors = torch.empty(len(order), parts[0].shape[1])
    vectors[torch.tensor(order)] = torch.cat(parts)
    return vectors


def agreement(student: Tensor, teacher: Tensor) -> dict[str, Any]:
    """Cosine similarity of two models' vectors, sentence by sentence: its mean, its 10th percentile and its minimum.

    Example:
        >>> import torch
        >>> agreement(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]]))["mean"]
        1.0
    """
    cosines = F.cosine_similarity(student.double(), teacher.double(), dim=-1)
    tenth = float(cosines.quantile(0.1))
    return {"mean": float(cosines.mean()), "tenth": tenth, "least": float(cosines.min()), "count": len(cosines)}


def sentences_of(texts: Sequence[str], count: int, *, least: int = 6, most: int = 60) -> list[str]:
    """Up to ``count`` sentences of ``least`` to ``most`` words, taken from the texts in equal numbers.

    Example:
        >>> sentences_of(["One two three. Four five six. Seven.", "Eight nine ten eleven!"], 2, least=3)
        ['One two three.', 'Eight nine ten eleven!']
    """
    fitting = []
    for text in texts:
        parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+", text)]
        fitting.append([part for part in parts if least <= len(part.split()) <= most])
    longest = max(map(len, fitting), default=0)
    return [parts[turn] for turn in range(longest) for parts in fitting if turn < len(parts)][:count]


@dataclass(frozen=True)
class Labelled:
    """Texts with class labels, for a linear probe."""

    train: Sequence[str]
    train_labels: Sequence[int]
    test: Sequence[str]
    test_labels: Sequence[int]

    @property
    def largest_class(self) -> float:
        """Percent of the test texts in their largest class: the accuracy of a probe that learned nothing."""
        return 100 * max(Counter(self.test_labels).values()) / len(self.test_labels)


def probe(labelled: Labelled, vectors: Callable[[Sequence[str]], Tensor]) -> float:
    """Accuracy, in percent, of a logistic regression on standardised vectors ``(texts, hidden)``."""
    need("the linear probe", "sklearn")
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    train, test = vectors(labelled.train), vectors(labelled.test)
    mean, std = train.mean(0), train.std(0).clamp(min=1e-6)
    fitted = LogisticRegression(max_iter=1000, C=0.1).fit(((train - mean) / std).numpy(), list(labelled.train_labels))
    return 100 * float(fitted.score(((test - mean) / std).numpy(), list(labelled.test_labels)))
