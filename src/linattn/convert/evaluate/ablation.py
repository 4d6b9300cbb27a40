"""Ablations: the same figures again with parts of the converted attention switched off."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, TypeVar

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
    before = [(core, core.zero_linear, core.zero_salient) for core in _windowed(model)]
    try:
        for core, _, _ in before:
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


def ablations(model: Any, measure: Callable[[str], Figure]) -> dict[str, Figure]:
    """Call ``measure(name)`` for each of the :func:`variants`, with the model's parts switched off."""
    figures = {}
    for name in variants(model):
        with ablated(model, **VARIANTS[name]):
            figures[name] = measure(name)
    return figures


def perplexity_worth(figures: Mapping[str, Perplexity]) -> list[dict[str, Any]]:
    """What each part adds: the full model's perplexity against that of each variant, over the windows that both saw.

    Rows have the ``gain`` in nats per token, its standard ``error``, and whether it ``counts``: is twice its error.
    """
    full = figures[FULL]
    return [
        _worth("perplexity", full.length, name, *gain(other, full)) for name, other in figures.items() if name != FULL
    ]


def needle_worth(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The full model's share of needles found against each variant's, by haystack and length.

    The error is that of a difference of two shares, each of so many texts.
    """
    rows = []
    for name, others in figures.items():
        for kind in dict.fromkeys((row["haystack"], row["length"]) for row in others) if name != FULL else ():
            (with_it, count), (without, _) = _share(figures[FULL], kind), _share(others, kind)
            # A share of 0 or 1 would have no spread; its variance is taken to be that of half a text at least.
            error = sqrt(sum(max(p * (1 - p), 0.5 / count) / count for p in (with_it, without)))
            rows.append(_worth("needle", kind[1], name, with_it - without, error) | {"haystack": kind[0]})
    return rows


def _worth(figure: str, length: int, without: str, gained: float, error: float) -> dict[str, Any]:
    counts = gained > ERRORS * error and gained > 0
    return {"figure": figure, "length": length, "without": without, "gain": gained, "error": error, "counts": counts}


def _share(rows: Sequence[Mapping[str, Any]], kind: tuple[str, int]) -> tuple[float, int]:
    alike = [row for row in rows if (row["haystack"], row["length"]) == kind]
    count = sum(row["count"] for row in alike)
    return sum(row["found"] * row["count"] for row in alike) / count, count
