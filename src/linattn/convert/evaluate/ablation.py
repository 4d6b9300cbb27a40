"""Ablations: the same figures again with parts of the converted attention switched off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, TypeVar

from linattn.convert.evaluate.needle import NeedleRow
from linattn.convert.evaluate.perplexity import Perplexity, gain
from linattn.convert.layer.attention import linearized_layers

FULL = "as converted"
NO_LINEAR = "without the linear part"
NO_SALIENT = "without salient tokens"
WINDOW = "window alone"
VARIANTS: dict[str, dict[str, bool]] = {
    FULL: {},
    NO_LINEAR: {"zero_linear": True},
    NO_SALIENT: {"zero_salient": True},
    WINDOW: {"zero_linear": True, "zero_salient": True},
}
ERRORS = 2.0  # how many standard errors a difference must exceed to count

Figure = TypeVar("Figure")


@contextmanager
def ablated(model: Any, *, zero_linear: bool = False, zero_salient: bool = False) -> Iterator[None]:
    """Switch parts off in every layer that has a window; on exit every layer is as it was before."""
    before = []
    try:
        for core in _windowed(model):
            before.append((core, core.zero_linear, core.zero_salient))
            core.zero_linear, core.zero_salient = zero_linear, zero_salient
        yield
    finally:
        for core, linear, salient in before:
            core.zero_linear, core.zero_salient = linear, salient


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


def ablations(model: Any, measure: Callable[[Any, str], Figure]) -> dict[str, Figure]:
    """Call ``measure(model, name)`` for each of the :func:`variants`, with its parts switched off."""
    found = {}
    for name in variants(model):
        with ablated(model, **VARIANTS[name]):
            found[name] = measure(model, name)
    return found


@dataclass(frozen=True)
class Worth:
    """What a part adds: ``gain`` in nats per token, or in the share of needles found; ``error`` is its standard error.

    Attributes:
        haystack: what the needles were hidden in; None for perplexity.
        counts: whether the gain is more than twice its standard error.
    """

    figure: str
    length: int
    without: str
    gain: float
    error: float
    haystack: str | None = None

    @property
    def counts(self) -> bool:
        return self.gain > ERRORS * self.error and self.gain > 0

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"counts": self.counts}
        return found if self.haystack else {name: value for name, value in found.items() if name != "haystack"}


def perplexity_worth(found: dict[str, Perplexity]) -> list[Worth]:
    """The full model's perplexity against that of each variant, over the windows that both saw."""
    full = found[FULL]
    return [Worth("perplexity", full.length, name, *gain(other, full)) for name, other in found.items() if name != FULL]


def needle_worth(found: dict[str, list[NeedleRow]]) -> list[Worth]:
    """The full model's retrieval against each variant's, by haystack and length.

    The error is that of a difference of two shares, each of so many texts.
    """
    worth = []
    for name, rows in found.items():
        for haystack, length in dict.fromkeys((row.haystack, row.length) for row in rows) if name != FULL else ():
            with_it, count = _share(found[FULL], haystack, length)
            without, _ = _share(rows, haystack, length)
            # A share of 0 or 1 would have no spread; its variance is taken to be that of half a text at least.
            error = sqrt(sum(max(p * (1 - p), 0.5 / count) / count for p in (with_it, without)))
            worth.append(Worth("needle", length, name, with_it - without, error, haystack))
    return worth


def _share(rows: list[NeedleRow], haystack: str, length: int) -> tuple[float, int]:
    own = [row for row in rows if (row.haystack, row.length) == (haystack, length)]
    count = sum(row.count for row in own)
    return sum(row.found * row.count for row in own) / count, count
