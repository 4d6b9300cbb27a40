"""Takes the same figures of a model at each stage of its conversion, and with parts of it switched off."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import pairwise, product
from math import sqrt
from typing import Any

from torch import Tensor

from linattn.convert.convert import linearized_layers
from linattn.convert.evaluate.embeddings import Labelled, agreement, probe, sentence_vectors, sentences_of
from linattn.convert.evaluate.measures import Windows, decoding, gain, losses_of_windows, perplexity_of, samples
from linattn.convert.evaluate.needles import (
    HAYSTACKS,
    NOISE,
    REPEATED,
    Haystack,
    Needle,
    by_length,
    encoder,
    least_length,
    needle_texts,
    needles_found,
    text_haystack,
)
from linattn.support.config import Config, option
from linattn.support.options import OptionError

LONGEST = 1024  # tokens of a window by default
LEAST_NEEDLE = 64  # fewest tokens of a text that hides a number
GPU_TOKENS = 16384  # tokens at once: fewer do not fill a GPU, and more would take gigabytes of logits
LONGEST_SENTENCE = 256
PIECE, LONGEST_PIECE = 1024, 4096  # tokens read at a time before decoding: softmax has a mask of all pairs
PROMPTS, PROMPT_WORDS = 3, 24  # texts that the models continue, and how many words of them are given
SENTENCES = 500  # whose vectors are compared
FIGURES = "Evaluation"
FULL, NO_LINEAR, NO_SALIENT = "as converted", "without the linear part", "without salient tokens"
WINDOW = "window alone"
ERRORS = 2.0  # how many standard errors a difference must exceed to count

Keep = Callable[[Mapping[str, Any], Callable[[], Mapping[str, Any]]], Mapping[str, Any]]
"""``keep(case, measure)``: the result of ``measure()``, or the one that was kept for the same case."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Config):
    """What is measured of a model. An empty tuple leaves its figure out; None stands for what suits the model."""

    lengths: tuple[int, ...] | None = option(
        None, "Windows of perplexity, with commas; texts of encoders are cut to them.", least=2, group=FIGURES,
        default_text="the model's own, up to 1024",
    )  # fmt: skip
    windows: int = option(1, "Windows of each text, at most.", least=1, group=FIGURES, rare=True)
    texts: int = option(20, "Texts to measure on, at most.", least=1, group=FIGURES, rare=True)
    needle_lengths: tuple[int, ...] | None = option(
        None, "Lengths of texts that hide a number, with commas, or none.", least=LEAST_NEEDLE, group=FIGURES,
        default_text="half of the model's own, and all",
    )  # fmt: skip
    needle_haystacks: tuple[str, ...] = option(
        (NOISE,), "What they are made of, with commas: noise (five sentences that repeat), text (that measured on).",
        choices=HAYSTACKS, group=FIGURES, rare=True,
    )  # fmt: skip
    needle_count: int = option(2, "Needles for each haystack, length and depth.", least=1, group=FIGURES, rare=True)
    contexts: tuple[int, ...] | None = option(
        None, "Lengths of the context after which decoding is timed, with commas, or none.", least=1, group=FIGURES,
        default_text="the model's own and beyond",
    )  # fmt: skip
    decode_steps: int = option(16, "Tokens that are decoded at each context.", least=2, hidden=True)
    new_tokens: int = option(60, "Tokens of each sample.", least=1, group=FIGURES, rare=True)
    ablate: bool = option(True, "Measure with parts of the attention switched off too.", group=FIGURES, rare=True)
    batch_tokens: int | None = option(None, "Tokens that a causal model sees at once.", least=1, hidden=True)
    seed: int = option(0, "Seed of first weights, order and draws.", least=0)

    def check(self) -> None:
        if len(set(self.needle_haystacks)) < len(self.needle_haystacks):
            raise OptionError("needle_haystacks", f"must name each once, got {','.join(self.needle_haystacks)}")
        for before, after in pairwise(sorted(self.contexts or ())):
            if after - before <= self.decode_steps:
                raise OptionError(
                    "contexts", f"must be more than the {self.decode_steps} steps apart, got {before} and {after}"
                )

    def suited(self, positions: int | None, gpu: bool, most: int | None = None) -> "EvaluationOptions":
        """With what suits a model trained on up to ``positions`` tokens wherever nothing else was asked for.

        ``most``: the number of tokens that the model can take, where its positions are learned; more are refused.

        Example:
            >>> suited = EvaluationOptions(windows=3).suited(256, gpu=False)
            >>> suited.needle_lengths, suited.contexts
            ((128, 256), (256, 512, 1024))
        """
        longest = min(most or positions or LONGEST, LONGEST)
        furthest = 32768 if gpu else 4 * longest
        contexts = [longest]
        while contexts[-1] * 2 <= furthest:
            contexts.append(contexts[-1] * 2)
        if most is not None:  # leave room for the steps after each context
            contexts = [longest // 4, longest // 2] if longest // 4 > self.decode_steps else [longest // 2]
        usual: dict[str, Any] = {
            "lengths": (longest,),
            "needle_lengths": tuple(length for length in (longest // 2, longest) if length >= LEAST_NEEDLE),
            "contexts": tuple(contexts),
            "batch_tokens": GPU_TOKENS if gpu else 1,
        }
        suited = replace(self, **{name: value for name, value in usual.items() if getattr(self, name) is None})
        for name, more in (("lengths", 0), ("needle_lengths", 0), ("contexts", self.decode_steps)):
            tokens = max(getattr(suited, name), default=0)
            if most is not None and tokens + more > most:
                raise OptionError(
                    name,
                    f"must not exceed {most - more:,}, as the model has learned {most:,} positions, got {tokens:,}",
                )
        return suited


class Evaluator:
    """Measures the stages of a model on the same texts.

    Args:
        tokenizer: the model's.
        texts: texts that no stage was trained on.
        causal: True for a language model, False for an encoder, whose first stage is the teacher that later stages are
            compared to.
        keep: finds figures again, see :data:`Keep`; a case has the stage, the figure, the options and the texts.
        tell: called with a line of text about each figure.
        labelled: labelled texts for a probe on frozen vectors, for encoders.
        pieces: token ids of the texts, where these have marks that the written texts lack; None: the texts are encoded.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[str],
        options: EvaluationOptions,
        *,
        causal: bool = True,
        keep: Keep = lambda case, measure: measure(),
        tell: Callable[[str], None] = print,
        labelled: Labelled | None = None,
        pieces: Sequence[list[int]] | None = None,
    ) -> None:
        self.tokenizer, self.causal, self.keep, self.tell, self.labelled = tokenizer, causal, keep, tell, labelled
        self.options = options.suited(None, gpu=False)
        self.texts = list(texts)[: options.texts]
        self.stages: list[dict[str, Any]] = []
        self._encode = encoder(tokenizer)
        ids = pieces if pieces is not None else map(self._encode, self.texts) if causal else ()
        self._ids = list(ids)[: options.texts]
        self._haystacks = self._make_haystacks() if causal and self.options.needle_lengths else []
        self._sentences = [] if causal else sentences_of(self.texts, SENTENCES)
        if not causal and not self._sentences:
            raise OptionError(
                "eval_text",
                "must have sentences of 6 to 60 words, whose vectors are compared; the texts to measure on have none",
            )
        self._teacher: Tensor | None = None
        self._needle_texts: dict[tuple[str, int], list[Needle]] = {}
        self._known: dict[tuple[str, str], Any] = {}
        words = blake2b("\0".join(self.texts).encode(), digest_size=12).hexdigest()
        self._case = {"options": self.options.values(), "texts": words, "labelled": labelled is not None}

    def _make_haystacks(self) -> list[Haystack]:
        """Raises OptionError where the texts are too short for a haystack, or a length is too short for its needle."""
        lengths = self.options.needle_lengths or ()
        least = least_length(self._encode)
        if min(lengths) < least:
            raise OptionError(
                "needle_lengths",
                f"must be none or at least {least} tokens, the needle and its question, got {min(lengths)}",
            )
        return [
            REPEATED if name == NOISE else text_haystack(self.texts, self._encode, max(lengths))
            for name in self.options.needle_haystacks
        ]

    def stage(self, name: str, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Figures of the model at this stage; ``full=False``: no speed, samples and probe."""
        self.stages.append({"name": name, **(self._language if self.causal else self._encoder)(name, model, full)})
        return self.stages[-1]

    def ablation(self, model: Any, stage: str) -> dict[str, Any] | None:
        """Perplexity and needles with parts of the attention switched off, and what each part is worth.

        ``stage`` names the stage that measured this model with nothing switched off. Worth has rows with the ``gain``
        of a part, in nats per token or in the share of needles found, its standard ``error``, and whether it
        ``counts``: is twice its error.
        """
        if not self.causal or not self.options.ablate or variants(model) == [FULL]:
            return None
        figures: dict[str, tuple[dict[int, Windows], list[dict[str, Any]]]] = {}
        for variant in variants(model):
            name = stage if variant == FULL else variant
            if variant != FULL:
                self.tell(variant)
            with ablated(model, variant):
                figures[variant] = self._windows(name, model), self._needles(name, model)
        shown = {name: shown_of(*both) for name, both in figures.items()}
        full, full_rows = figures.pop(FULL)
        worth = [row for name, (_, rows) in figures.items() for row in needle_worth(name, full_rows, rows)]
        for length, windows in full.items():
            worth += [
                part_worth("perplexity", length, name, *gain(other[length], windows))
                for name, (other, _) in figures.items()
            ]
        return {"variants": shown, "worth": worth}

    def _figure(self, stage: str, figure: str, measure: Callable[[], Any]) -> Any:
        """One figure, ready for JSON; measured if it is not known yet."""
        if (stage, figure) not in self._known:
            case = {"stage": stage, "figure": figure, **self._case}
            self._known[stage, figure] = self.keep(case, lambda: {"value": measure()})["value"]
        return self._known[stage, figure]

    def _language(self, stage: str, model: Any, full: bool) -> dict[str, Any]:
        windows, rows = self._windows(stage, model), self._needles(stage, model)
        figures: dict[str, Any] = {"needle": rows} | shown_of(windows, rows)
        if full:
            figures["decoding"] = self._figure(stage, "decoding", lambda: self._decoding(model))
            figures["samples"] = self._figure(stage, "samples", lambda: self._samples(model))
        return figures

    def _windows(self, stage: str, model: Any) -> dict[int, Windows]:
        """Losses of windows, by the length of the windows."""

        def measure(length: int) -> Windows:
            rows = max(1, (self.options.batch_tokens or 1) // length)
            windows = losses_of_windows(model, self._ids, length, windows=self.options.windows, batch_size=rows)
            self.tell(f"perplexity {perplexity_of(windows)['perplexity']:.3f} on windows of {length:,} tokens")
            return windows

        lengths = self.options.lengths or ()
        return {each: self._figure(stage, f"perplexity {each}", partial(measure, each)) for each in lengths}

    def _needles(self, stage: str, model: Any) -> list[dict[str, Any]]:
        options = self.options

        def measure(haystack: Haystack, length: int) -> list[dict[str, Any]]:
            key = haystack.name, length
            if key not in self._needle_texts:  # kept for all stages: making them takes longer than reading them
                self._needle_texts[key] = needle_texts(
                    self._encode, length, count=options.needle_count, haystack=haystack, seed=options.seed,
                )  # fmt: skip
            rows = needles_found(model, self._needle_texts[key], length, batch_tokens=options.batch_tokens or 1)
            share = 100 * by_length(rows)[0]["found"]
            self.tell(f"needles found in {haystack.name} of {length:,} tokens: {share:.0f} %")
            return rows

        return [
            row
            for haystack, length in product(self._haystacks, options.needle_lengths or ())
            for row in self._figure(stage, f"needle {haystack.name} {length}", partial(measure, haystack, length))
        ]

    def _decoding(self, model: Any) -> list[dict[str, Any]]:
        return decoding(
            model,
            self.options.contexts or (),
            text=[i for ids in self._ids for i in ids],
            steps=self.options.decode_steps,
            piece=min(max(self.options.batch_tokens or 1, PIECE), LONGEST_PIECE),
            progress=lambda row: self.tell(f"context {row['context']:,}: {row['tokens_per_second']:,.1f} tokens/s"),
        )

    def _samples(self, model: Any) -> list[dict[str, str]]:
        """The model continues the first words of the first texts that have more."""
        long = [words for text in self.texts if len(words := text.split()) > PROMPT_WORDS]
        prompts = [" ".join(words[:PROMPT_WORDS]) for words in long[:PROMPTS]]
        written = samples(model, self.tokenizer, prompts, max_new_tokens=self.options.new_tokens)
        return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, written, strict=True)]

    def _encoder(self, stage: str, model: Any, full: bool) -> dict[str, Any]:
        # Texts are cut to the longest length.
        length = max(self.options.lengths or (), default=LONGEST_SENTENCE)
        vectors = partial(sentence_vectors, model, self.tokenizer, length=length)
        if self._teacher is None:
            self._teacher = vectors(self._sentences)  # for later stages to be compared to: never read from a file
        teacher, labelled = self._teacher, self.labelled
        figures = {"agreement": self._figure(stage, "agreement", lambda: agreement(vectors(self._sentences), teacher))}
        self.tell(f"cosine to the teacher's vectors {figures['agreement']['mean']:.4f}")
        if labelled is not None and full:
            figures["probe"] = self._figure(stage, "probe", lambda: probe(labelled, vectors))
            figures["probe_largest_class"] = labelled.largest_class
            self.tell(f"probe {figures['probe']:.2f} %, the largest class alone {labelled.largest_class:.2f} %")
        return figures


@contextmanager
def ablated(model: Any, variant: str) -> Iterator[None]:
    """Switch the parts of a variant off in every layer that has a window; on exit they are all on."""
    cores = _windowed(model)
    try:
        for core in cores:
            core.zero_linear, core.zero_salient = variant in (NO_LINEAR, WINDOW), variant in (NO_SALIENT, WINDOW)
        yield
    finally:
        for core in cores:
            core.zero_linear = core.zero_salient = False


def variants(model: Any) -> list[str]:
    """Names of the variants that differ. Layers without a window stay whole: their parts are all they have."""
    plans = [core.plan for core in _windowed(model)]
    linear = any(plan.features != "none" for plan in plans)
    salient = any(plan.budget is not None for plan in plans)
    differ = {FULL: True, NO_LINEAR: linear, NO_SALIENT: salient, WINDOW: linear and salient}
    return [name for name, does in differ.items() if does]


def _windowed(model: Any) -> list[Any]:
    cores: list[Any] = [layer.core for layer in linearized_layers(model).values()]
    return [core for core in cores if core.plan.kind == "hybrid" and core.plan.window]


def shown_of(windows: Mapping[int, Windows], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Perplexities of each length of windows, and needles found."""
    perplexities = [{"length": length} | perplexity_of(each) for length, each in windows.items()]
    return {"perplexity": perplexities, "needle_by_length": by_length(rows)}


def needle_worth(name: str, full: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The full model's share of needles found against a variant's, by haystack and length.

    The error is that of a difference of two shares, each of so many texts.
    """
    rows = []
    for one, other in zip(by_length(full), by_length(others), strict=True):
        # A share of 0 or 1 would have no spread; its variance is taken to be that of half a text at least.
        shares = [(row["found"], row["count"]) for row in (one, other)]
        error = sqrt(sum(max(p * (1 - p), 0.5 / count) / count for p, count in shares))
        row = part_worth("needle", one["length"], name, one["found"] - other["found"], error)
        rows.append(row | {"haystack": one["haystack"]})
    return rows


def part_worth(figure: str, length: int, without: str, gained: float, error: float) -> dict[str, Any]:
    counts = gained > ERRORS * error and gained > 0
    return {"figure": figure, "length": length, "without": without, "gain": gained, "error": error, "counts": counts}
