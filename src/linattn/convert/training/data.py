"""Training data of the stages of a conversion, and the held-out part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from linattn.convert.adapters import find_adapter
from linattn.convert.training.setting import Batch, Batches, StageOptions
from linattn.convert.training.text import Source, TokenText, batched, read_text
from linattn.support.options import OptionError

LONGEST = 1024  # tokens of a training sequence by default
HELD_OUT_TOKENS = 4096  # tokens that quality is measured on after each stage


@dataclass(frozen=True, eq=False)
class Data:
    """Batches of each stage, and the held-out batches that quality is measured on."""

    batches: Callable[[StageOptions], Batches]
    held_out: list[Batch]
    length: int | None

    @classmethod
    def of_batches(cls, batches: Batches, held_out: Sequence[Batch]) -> "Data":
        return cls(lambda _: batches, list(held_out), None)

    @classmethod
    def of_text(
        cls, model: Any, source: Source | Sequence[Source], tokenizer: Any, stages: Sequence[StageOptions]
    ) -> "Data":
        text = read_text(source, tokenizer if tokenizer is not None else _own_tokenizer(model))
        given = stages[0].length if stages else None  # a later stage's own length does not count for the first
        length = suited_length(model, LONGEST) if given is None else given
        for stage in stages:  # too little text is reported before any work is done
            check_positions(model, "length", stage.length or length)
            _token_batches(text, stage, length)
        windows = text.windows(length, max(1, HELD_OUT_TOKENS // length))
        held_out: list[Batch] = list(batched(windows, 4))
        return cls(lambda stage: _token_batches(text, stage, length), held_out, length)

    def sized(self, stage: Any) -> Any:
        """A stage's options with its length filled in, if it was None."""
        return stage if stage.length is not None else replace(stage, length=self.length)


def suited_length(model: Any, longest: int) -> int:
    """The number of tokens that the model was made for, at most ``longest``."""
    most = find_adapter(model).most_tokens(model)
    return min(getattr(model.config, "max_position_embeddings", longest) if most is None else most, longest)


def check_positions(model: Any, option: str, tokens: int) -> None:
    """Raise OptionError if texts have more tokens than the model has learned positions."""
    most = find_adapter(model).most_tokens(model)
    if most is not None and tokens > most:
        raise OptionError(option, f"must not exceed the {most:,} positions that the model has learned, got {tokens:,}")


def tokens_of(stage: StageOptions) -> int | None:
    """Number of tokens that a stage trains on; None if it has no length."""
    return None if stage.length is None else stage.steps_of(stage.length) * stage.batch_size * stage.length


def _token_batches(text: TokenText, stage: StageOptions, length: int) -> Batches:
    return text.batches(stage.batch_size, stage.length or length, stage.seed, stage.recall_share)


def _own_tokenizer(model: Any) -> Any:
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not source:
        raise OptionError("tokenizer", "is needed to read text: the model does not say where it came from")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)
