"""What the generated parts of pages share: numbers in cells, tables, and the chart beside a result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def three_digits(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def where(meta: dict[str, Any]) -> str:
    """Device, version, date and command."""
    return f"{meta['device']}, torch {meta['versions']['torch']}, {meta['date'][:10]}: `{meta['command']}`."


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], numbers_from: int = 1) -> list[str]:
    """A table, in which the columns from ``numbers_from`` on are set to the right."""
    rule = "|" + "".join("---|" if i < numbers_from else "---:|" for i in range(len(head)))
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]


def chart_line(path: Path, words: str) -> list[str]:
    """The chart beside a result, if there is one, as a page in ``docs`` links it."""
    chart = path.with_suffix(".png")
    return ["", f"![{words}](../{chart.relative_to(path.parents[2]).as_posix()})"] if chart.exists() else []
