"""Options of the evaluation: what is measured of a model, and how much of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from linattn.convert.evaluate.haystack import HAYSTACKS, NOISE
from linattn.support.options import OptionError, check_option

LONGEST = 1024  # tokens of a window by default
LEAST_NEEDLE = 64  # fewest tokens of a text that hides a number
GPU_TOKENS = 16384  # tokens at once: fewer do not fill a GPU, and more would take gigabytes of logits


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation. An empty list leaves its figure out.

    Attributes:
        lengths: tokens per window of perplexity; an encoder's texts are cut to the largest.
        windows: at most so many windows of each text.
        texts: at most so many texts.
        needle_lengths: tokens of the texts that hide a number.
        needle_haystacks: what hides it: ``noise``, five sentences that repeat, or ``text``, the evaluation texts.
        needle_count: texts with a needle, for each haystack, each length and each of five depths.
        needle_digits: digits of the number.
        contexts: numbers of tokens after which decoding is timed.
        steps: tokens that are decoded at each context.
        seconds: after this time no further context is begun.
        prompts: number of texts that the models continue.
        new_tokens: tokens that they write.
        sentences: number of sentences whose vectors are compared (encoders).
        probe_texts: at most so many texts of each class for the probe, to train and to test; None: all.
        ablate: measure again with parts of the attention switched off.
        batch_tokens: tokens that a causal model sees at once, but at least one window or text.
        seed: random seed of the needles.
    """

    lengths: tuple[int, ...] = ()
    windows: int = 1
    texts: int = 20
    needle_lengths: tuple[int, ...] = ()
    needle_haystacks: tuple[str, ...] = (NOISE,)
    needle_count: int = 2
    needle_digits: int = 5
    contexts: tuple[int, ...] = ()
    steps: int = 16
    seconds: float = 120.0
    prompts: int = 3
    new_tokens: int = 60
    sentences: int = 500
    probe_texts: int | None = None
    ablate: bool = True
    batch_tokens: int = 1
    seed: int = 0

    def check(self, most: int | None = None) -> None:
        """Raise OptionError that names the option and what is allowed; ``most``: tokens that the model can take."""
        least = {"windows": 1, "texts": 1, "needle_count": 1, "needle_digits": 1, "steps": 2, "prompts": 0,
                 "new_tokens": 1, "sentences": 1, "batch_tokens": 1}  # fmt: skip
        for name, low in least.items():
            if getattr(self, name) < low:
                raise OptionError(name, f"must be an integer >= {low}, got {getattr(self, name)}")
        if self.probe_texts is not None and self.probe_texts < 1:
            raise OptionError("probe_texts", f"must be an integer >= 1, got {self.probe_texts}")
        for name, low in (("lengths", 2), ("needle_lengths", LEAST_NEEDLE), ("contexts", 1)):
            for value in getattr(self, name):
                if value < low:
                    raise OptionError(name, f"must be integers >= {low}, got {value}")
        for haystack in self.needle_haystacks:
            check_option("needle_haystacks", haystack, HAYSTACKS)
        if len(set(self.needle_haystacks)) < len(self.needle_haystacks):
            raise OptionError("needle_haystacks", f"must name each once, got {','.join(self.needle_haystacks)}")
        for before, after in zip(sorted(self.contexts), sorted(self.contexts)[1:], strict=False):
            if after - before <= self.steps:
                raise OptionError(
                    "contexts", f"must be more than the {self.steps} steps apart, got {before} and {after}"
                )

        for name, more in (("lengths", 0), ("needle_lengths", 0), ("contexts", self.steps)):
            tokens = max(getattr(self, name), default=0)
            if most is not None and tokens + more > most:
                raise OptionError(
                    name,
                    f"must not exceed {most - more:,}, as the model has learned {most:,} positions, got {tokens:,}",
                )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fingerprint(self) -> str:
        """A string that differs if figures do; ``needle_haystacks`` of noise alone is left out, as in older files."""
        return repr(self).replace(f", needle_haystacks={(NOISE,)}", "")

    @classmethod
    def suited(
        cls, positions: int | None, gpu: bool, changes: Mapping[str, Any], most: int | None = None
    ) -> "EvaluationOptions":
        """Options for a model trained on up to ``positions`` tokens, except for ``changes`` that are not None.

        ``most``: the number of tokens that the model can take, where its positions are learned.

        Example:
            >>> EvaluationOptions.suited(256, False, {"windows": 3, "steps": None}).needle_lengths
            (128, 256)
        """
        longest = min(most or positions or LONGEST, LONGEST)
        furthest = 32768 if gpu else 4 * longest
        contexts = [longest]
        while contexts[-1] * 2 <= furthest:
            contexts.append(contexts[-1] * 2)
        if most is not None:  # leave room for the steps after each context
            contexts = [longest // 4, longest // 2] if longest // 4 > cls.steps else [longest // 2]
        suited = cls(
            lengths=(longest,),
            needle_lengths=tuple(length for length in (longest // 2, longest) if length >= LEAST_NEEDLE),
            contexts=tuple(contexts),
            batch_tokens=GPU_TOKENS if gpu else 1,
        )
        return replace(suited, **{name: value for name, value in changes.items() if value is not None})
