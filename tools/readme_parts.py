"""What the generated parts of pages share: numbers in cells, and the chart beside a result."""

from pathlib import Path


def three_digits(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def chart_line(path: Path, words: str) -> list[str]:
    """The chart beside a result, if there is one, as a page in ``docs`` links it."""
    chart = path.with_suffix(".png")
    return ["", f"![{words}](../{chart.relative_to(path.parents[2]).as_posix()})"] if chart.exists() else []
