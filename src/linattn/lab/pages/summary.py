"""Sentences about the findings of a comparison, which claim nothing that the spread does not show."""

from collections.abc import Mapping
from typing import Any

from linattn.lab.page.numbers import counted, listed
from linattn.lab.pages.csv_files import write_csv
from linattn.lab.pages.metric import Metric
from linattn.lab.pages.read import Accuracy, Comparison

__all__ = ["edge_sentence", "ranking_sentence", "write_csv"]


def ranking_sentence(results: Mapping[str, Any]) -> str:
    """The best linear mechanism by its mean, those whose min-max range overlaps its own, and softmax beside it.

    Two mechanisms are told apart only if every run of one is above every run of the other.

    Example:
        >>> rows = [("mirror", 97.5), ("mirror", 97.1), ("nala", 97.2), ("nala", 97.0), ("relu", 95.0), ("relu", 95.4)]
        >>> rows = [{"mechanism": name, "status": "done", "top1": top1} for name, top1 in rows]
        >>> print(ranking_sentence({"rows": rows}).replace(". ", "." + chr(10)))
        Of the linear mechanisms mirror has the highest mean top-1: 97.30 % (97.10 to 97.50 over 2 seeds).
        No difference beyond the spread to nala, whose range overlaps its own.
        Every run of relu is below every run of mirror.
    """
    comparison = Comparison(results)
    parts = [_progress(comparison)]
    for width, names in comparison.widths.items():
        said = [_among_linear(comparison, names), _beside_reference(comparison, names)]
        found = " ".join(part for part in said if part)
        parts.append(f"At width {width}: {found}" if width else found)
    return " ".join(part for part in parts if part)


def edge_sentence(results: Mapping[str, Any]) -> str:
    """Name the mechanisms whose learning rate is the lowest or highest of those tried; empty if there are none.

    Example:
        >>> tried = [{"mechanism": "elu", "lr": 0.01, "lr_edge": "highest"}, {"mechanism": "relu", "lr": 0.003}]
        >>> edge_sentence({"mechanisms": tried})
        'At the edge of the learning rates that were tried, so that a better one may lie beyond: elu (highest, 0.01).'
    """
    found = [entry for entry in results.get("mechanisms") or [] if entry.get("lr_edge")]
    if not found:
        return ""
    words = [f"{entry['mechanism']} ({entry['lr_edge']}, {entry['lr']:g})" for entry in found]
    return f"At the edge of the learning rates that were tried, so that a better one may lie beyond: {listed(words)}."


def _progress(comparison: Comparison) -> str:
    done, failed = len(comparison.runs(status="done")), len(comparison.runs(status="failed"))
    words = ""
    if not comparison.finished:
        planned = max(len(comparison.rows), len(comparison.names) * len(comparison.meta.get("seeds") or []))
        words = f"Unfinished: {done} of {counted(planned, 'run')} {'is' if done == 1 else 'are'} done."
    if failed:
        words += f" {counted(failed, 'run')} failed and {'is' if failed == 1 else 'are'} left out."
    return words.strip()


def _among_linear(comparison: Comparison, names: list[str]) -> str:
    metric, found = comparison.metric, _accuracies(comparison, names, linear=True)
    others = [name for name in names if not comparison.is_reference(name)]
    one, kind = "linear mechanism", "linear mechanisms"
    if not comparison.are_linear(others):
        one, kind = "mechanism other than softmax", "mechanisms other than softmax"
    if not found:
        return f"No {one} has a result yet."
    best = _best(metric, found)
    top = found.pop(best)
    if top.runs < 2:
        lead = f"{best} has the {metric.extreme} {metric.name} of the {kind},"
        lead = lead if found else f"The {metric.name} of {best} is"
        return f"{lead} {metric.text(top.mean)} in one run: the spread is unknown, so no ranking is claimed."
    lead = f"Of the {kind} {best} has the {metric.extreme} mean {metric.name}:"
    lead = lead if found else f"The mean {metric.name} of {best} is"
    lead += f" {_range(metric, top)}."
    alone = [name for name, other in found.items() if other.runs < 2]
    near = [name for name, other in found.items() if name not in alone and other.overlaps(top)]
    worse = [name for name in found if name not in alone and name not in near]
    side = metric.side(better=False)
    return " ".join([lead, *_near(near, everyone=len(near) == len(found)), *_worse(worse, best, side), *_alone(alone)])


def _near(names: list[str], everyone: bool) -> list[str]:
    if not names:
        return []
    if everyone and len(names) > 1:
        return [f"No difference beyond the spread: the ranges of {listed(names)} all overlap its own."]
    whose = "whose range overlaps" if len(names) == 1 else "whose ranges overlap"
    return [f"No difference beyond the spread to {listed(names)}, {whose} its own."]


def _worse(names: list[str], best: str, side: str) -> list[str]:
    return [f"Every run of {listed(names)} is {side} every run of {best}."] if names else []


def _alone(names: list[str]) -> list[str]:
    return [f"{listed(names)} {'has' if len(names) == 1 else 'have'} one run, too few to place."] if names else []


def _beside_reference(comparison: Comparison, names: list[str]) -> str:
    metric = comparison.metric
    references, found = (_accuracies(comparison, names, linear=linear) for linear in (False, True))
    if not references:
        return ""
    name = _best(metric, references)
    reference = references[name]
    lead = f"The reference, {name}, has {_range(metric, reference)}"
    if not found:
        return f"{lead}."
    best = _best(metric, found)
    top = found[best]
    if min(reference.runs, top.runs) < 2:
        return f"{lead}."
    if reference.overlaps(top):
        return f"{lead}: no difference beyond the spread to {best}."
    return f"{lead}: every run is {'above' if reference.mean > top.mean else 'below'} those of {best}."


def _accuracies(comparison: Comparison, names: list[str], *, linear: bool) -> dict[str, Accuracy]:
    found = {name: comparison.accuracy(name) for name in names if comparison.is_reference(name) != linear}
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def _best(metric: Metric, found: dict[str, Accuracy]) -> str:
    return metric.best({name: accuracy.mean for name, accuracy in found.items()})


def _range(metric: Metric, accuracy: Accuracy) -> str:
    if accuracy.runs < 2:
        return f"{metric.text(accuracy.mean)} in one run"
    low, high = metric.number(accuracy.low), metric.number(accuracy.high)
    return f"{metric.text(accuracy.mean)} ({low} to {high} over {counted(accuracy.runs, 'seed')})"
