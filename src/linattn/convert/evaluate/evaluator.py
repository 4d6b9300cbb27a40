"""Takes the same figures of a model at each stage of its conversion."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from linattn.convert.evaluate.ablation import FULL, ablations, needle_worth, perplexity_worth, variants
from linattn.convert.evaluate.decoding import decoding
from linattn.convert.evaluate.embeddings import agreement, probe, sentence_vectors, sentences_of
from linattn.convert.evaluate.haystack import NOISE, REPEATED, Haystack, text_haystack
from linattn.convert.evaluate.kept import Kept
from linattn.convert.evaluate.needle import NeedleRow, by_length, needles_found
from linattn.convert.evaluate.needle_text import Needle, encoder, least_length, needle_texts
from linattn.convert.evaluate.options import EvaluationOptions
from linattn.convert.evaluate.perplexity import Perplexity, perplexity
from linattn.convert.evaluate.samples import prompts_of, samples
from linattn.support.options import OptionError

LONGEST_SENTENCE = 256
PIECE, LONGEST_PIECE = 1024, 4096  # tokens read at a time before decoding: softmax has a mask of all pairs
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Labelled:
    """Texts with class labels, for a linear probe."""

    train: Sequence[str]
    train_labels: Sequence[int]
    test: Sequence[str]
    test_labels: Sequence[int]

    def first(self, count: int) -> "Labelled":
        """Keep the first ``count`` texts of each class, for training and for testing.

        Example:
            >>> Labelled(["a", "b", "c"], [1, 0, 1], ["d", "e"], [1, 0]).first(1)
            Labelled(train=['a', 'b'], train_labels=[1, 0], test=['d', 'e'], test_labels=[1, 0])
        """
        return Labelled(*_first(self.train, self.train_labels, count), *_first(self.test, self.test_labels, count))


def _first(texts: Sequence[str], labels: Sequence[int], count: int) -> tuple[list[str], list[int]]:
    seen: Counter[int] = Counter()
    kept = []
    for place, label in enumerate(labels):
        seen[label] += 1
        if seen[label] <= count:
            kept.append(place)
    return [texts[place] for place in kept], [labels[place] for place in kept]


@dataclass
class Evaluator:
    """Measures the stages of a model on the same texts; with a ``path``, each figure is written once it is measured.

    Attributes:
        tokenizer: the model's.
        texts: texts that no stage was trained on.
        causal: True for a language model, False for an encoder, whose first stage is the teacher that later stages are
            compared to.
        path: JSON file of finished stages and single figures; a file that was written with other options or texts is
            started anew.
        tell: called with a line of text about each figure.
        labelled: labelled texts for a probe on frozen vectors, for encoders.
        pieces: token ids of the texts, where these have marks that the written texts lack; None: the texts are encoded.
    """

    tokenizer: Any
    texts: Sequence[str]
    options: EvaluationOptions
    causal: bool = True
    path: Path | None = None
    tell: Tell = print
    labelled: Labelled | None = None
    pieces: Sequence[list[int]] | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)
    _teacher: Tensor | None = None

    def __post_init__(self) -> None:
        self.texts = list(self.texts)[: self.options.texts]
        self._encode = encoder(self.tokenizer)
        pieces = self.pieces if self.pieces is not None else map(self._encode, self.texts) if self.causal else ()
        self._ids = list(pieces)[: self.options.texts]
        self._haystacks = self._make_haystacks()
        self._sentences = [] if self.causal else self._find_sentences()
        self._needle_texts: dict[tuple[str, int], list[Needle]] = {}
        text = "\0".join([self.options.fingerprint(), str(self.causal), *self.texts])
        self._kept = Kept(self.path, blake2b(text.encode(), digest_size=12).hexdigest())

    def _make_haystacks(self) -> list[Haystack]:
        """Raises OptionError where the texts are too short for a haystack, or a length is too short for its needle."""
        if not self.causal or not self.options.needle_lengths:
            return []
        shortest, longest = min(self.options.needle_lengths), max(self.options.needle_lengths)
        least = least_length(self._encode, self.options.needle_digits)
        if shortest < least:
            raise OptionError(
                "needle_lengths",
                f"must be none or at least {least} tokens, the needle and its question, got {shortest}",
            )
        return [
            REPEATED if name == NOISE else text_haystack(self.texts, self._encode, longest)
            for name in self.options.needle_haystacks
        ]

    def _find_sentences(self) -> list[str]:
        found = sentences_of(self.texts, self.options.sentences)
        if not found:
            raise OptionError(
                "eval_text",
                "must have sentences of 6 to 60 words, whose vectors are compared; the texts to measure on have none",
            )
        return found

    def stage(self, name: str, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Figures of the model at this stage, kept under ``name``; ``full=False``: no speed, samples and probe."""
        if not self.causal and self._teacher is None:
            self._teacher = self._vectors(model)  # for later stages to be compared to: never read from a file
        if name not in self._kept.stages:
            self._kept.keep(name, self._language(name, model, full) if self.causal else self._encoder(model, full))
        found = {"name": name, **self._kept.stages[name]}
        self.stages.append(found)
        return found

    def ablation(self, model: Any, stage: str | None = None) -> dict[str, Any] | None:
        """Perplexity and needles with parts of the attention switched off, and what each part is worth.

        ``stage`` names the stage that measured this model with nothing switched off; None: this is measured here.
        """
        if not self.causal or not self.options.ablate or variants(model) == [FULL]:
            return None
        if "ablation" not in self._kept.stages:

            def measure(each: Any, variant: str) -> tuple[list[Perplexity], list[NeedleRow]]:
                if variant != FULL or stage is None:
                    self.tell(variant)
                name = stage if variant == FULL and stage is not None else variant
                return self._perplexities(name, each), self._needles(name, each)

            self._kept.keep("ablation", _worth(ablations(model, measure)))
        return dict(self._kept.stages["ablation"])

    def _language(self, stage: str, model: Any, full: bool) -> dict[str, Any]:
        perplexities, rows = self._perplexities(stage, model), self._needles(stage, model)
        found: dict[str, Any] = {
            "perplexity": [each.as_dict() for each in perplexities],
            "needle": [row.as_dict() for row in rows],
            "needle_by_length": by_length(rows),
        }
        if not full:
            return found
        return found | {
            "decoding": self._kept.figure(stage, "decoding", lambda: self._decoding(model)),
            "samples": self._kept.figure(stage, "samples", lambda: self._samples(model)),
        }

    def _decoding(self, model: Any) -> list[dict[str, Any]]:
        speed = decoding(
            model,
            self.options.contexts,
            text=[i for ids in self._ids for i in ids] or None,
            steps=self.options.steps,
            piece=min(max(self.options.batch_tokens, PIECE), LONGEST_PIECE),
            seconds=self.options.seconds,
            progress=lambda row: self.tell(f"context {row.context:,}: {row.tokens_per_second:,.1f} tokens/s"),
        )
        return [row.as_dict() for row in speed]

    def _samples(self, model: Any) -> list[dict[str, str]]:
        prompts = prompts_of(self.texts, self.options.prompts)
        written = samples(model, self.tokenizer, prompts, max_new_tokens=self.options.new_tokens)
        return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, written, strict=True)]

    def _perplexities(self, stage: str, model: Any) -> list[Perplexity]:
        options = self.options

        def measure(length: int) -> list[tuple[float, int]]:
            rows = max(1, options.batch_tokens // length)
            found = perplexity(model, self._ids, length, windows=options.windows, batch_size=rows)
            self.tell(f"perplexity {found.perplexity:.3f} on windows of {length:,} tokens")
            return found.windows

        found = []
        for length in options.lengths:
            windows = self._kept.figure(stage, f"perplexity {length}", partial(measure, length))
            found.append(Perplexity(length, [(float(nats), tokens) for nats, tokens in windows]))
        return found

    def _needles(self, stage: str, model: Any) -> list[NeedleRow]:
        def measure(haystack: Haystack, length: int) -> list[dict[str, Any]]:
            texts = self._needles_of(haystack, length)
            rows = needles_found(model, texts, length, batch_tokens=self.options.batch_tokens)
            share = 100 * by_length(rows)[0]["found"]
            self.tell(f"needles found in {haystack.name} of {length:,} tokens: {share:.0f} %")
            return [row.as_dict() for row in rows]

        found = []
        for haystack, length in product(self._haystacks, self.options.needle_lengths):
            name = f"needle {length}" if haystack.name == NOISE else f"needle {haystack.name} {length}"
            rows = self._kept.figure(stage, name, partial(measure, haystack, length))
            found += [NeedleRow(**row | {"nats": float(row["nats"])}) for row in rows]
        return found

    def _needles_of(self, haystack: Haystack, length: int) -> list[Needle]:
        """The needle texts of one length, kept for all stages: making them takes longer than reading them."""
        key, options = (haystack.name, length), self.options
        if key not in self._needle_texts:
            self._needle_texts[key] = needle_texts(
                self._encode, length, count=options.needle_count, digits=options.needle_digits, haystack=haystack,
                seed=options.seed,
            )  # fmt: skip
        return self._needle_texts[key]

    def _vectors(self, model: Any) -> Tensor:
        return sentence_vectors(model, self.tokenizer, self._sentences, length=self._longest)

    @property
    def _longest(self) -> int:
        """The number of tokens that an encoder's texts are cut to."""
        return max(self.options.lengths, default=LONGEST_SENTENCE)

    def _encoder(self, model: Any, full: bool) -> dict[str, Any]:
        assert self._teacher is not None
        found: dict[str, Any] = {"agreement": agreement(self._vectors(model), self._teacher).as_dict()}
        self.tell(f"cosine to the teacher's vectors {found['agreement']['mean']:.4f}")
        if self.labelled is not None and full:
            train, test = (
                sentence_vectors(model, self.tokenizer, texts, length=self._longest)
                for texts in (self.labelled.train, self.labelled.test)
            )
            found["probe"] = probe(train, self.labelled.train_labels, test, self.labelled.test_labels)
            # The accuracy of a probe that learned nothing: a figure near it says nothing about the vectors.
            labels = self.labelled.test_labels
            found["probe_largest_class"] = 100 * max(Counter(labels).values()) / len(labels)
            self.tell(f"probe {found['probe']:.2f} %, the largest class alone {found['probe_largest_class']:.2f} %")
        return found


def _worth(found: dict[str, tuple[list[Perplexity], list[NeedleRow]]]) -> dict[str, Any]:
    variants = {
        name: {
            "perplexity": [each.as_dict() for each in perplexities],
            "needle_by_length": by_length(rows),
        }
        for name, (perplexities, rows) in found.items()
    }
    worth = needle_worth({name: rows for name, (_, rows) in found.items()})
    for i in range(len(found[FULL][0])):
        worth += perplexity_worth({name: perplexities[i] for name, (perplexities, _) in found.items()})
    return {"variants": variants, "worth": [each.as_dict() for each in worth]}
