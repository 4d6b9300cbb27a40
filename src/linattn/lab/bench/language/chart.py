"""Lines by length: the style that the charts of language models share."""

from collections.abc import Mapping, Sequence
from typing import Any

from linattn.lab.bench.chart import COLORS, MARKERS
from linattn.support.extras import need


def new_figure(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure without global state or a display, and its panels as a table."""
    need("a chart", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def style_of(index: int) -> dict[str, Any]:
    """Style of a mechanism by its place in the list; softmax is first and grey."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def draw_line(panel: Any, points: Mapping[int, float], name: str, index: int, **more: Any) -> None:
    """Draw a line; ``name`` is its legend, none for a line that shares another one's style."""
    if points:
        x = sorted(points)
        panel.plot(x, [points[T] for T in x], label=name or None, **(style_of(index) | more))


def draw_missing(panel: Any, lengths: Sequence[int], words: str, index: int) -> None:
    """Mark missing numbers by crosses at the top, with one label."""
    if not lengths:
        return
    at_top, height = panel.get_xaxis_transform(), 0.96 - 0.05 * index
    color = style_of(index)["color"]
    panel.plot(lengths, [height] * len(lengths), "x", color=color, markersize=8, markeredgewidth=2, transform=at_top)
    panel.set_ymargin(0.15)  # room for both above the measured lines
    panel.annotate(
        words, (min(lengths), height), xycoords=at_top, xytext=(-8, 0), textcoords="offset points", ha="right",
        va="center", color=color, fontsize=8,
    )  # fmt: skip


def draw_crossovers(panel: Any, found: Sequence[tuple[int, float]], shortest: float) -> None:
    """Draw a dotted line where each mechanism becomes faster than softmax; ``found``: its place, and the length.

    Mechanisms that are faster from the ``shortest`` length on get none, as their lines would cover each other.
    """
    later = sorted((item for item in found if item[1] > shortest), key=lambda item: item[1])
    for place, (index, length) in enumerate(later):
        color = style_of(index)["color"]
        panel.axvline(length, color=color, linestyle=":", linewidth=1)
        panel.annotate(
            f" {length:,.0f}",
            (length, 0.02 + 0.05 * place),
            xycoords=("data", "axes fraction"),
            color=color,
            fontsize=8,
        )


def finish_panel(panel: Any, lengths: Sequence[int], title: str, xlabel: str, ylabel: str, *, log: bool = True) -> None:
    """Finish a panel; ``log``: its y axis is logarithmic too, otherwise it starts at 0."""
    panel.set_xscale("log", base=2)
    if log:
        panel.set_yscale("log", base=2)
    else:
        panel.set_ylim(0, 1.08 * panel.get_ylim()[1])
    panel.set_xticks(lengths, [short(T) for T in lengths])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panel.set(title=title, xlabel=xlabel, ylabel=ylabel)
    panel.grid(alpha=0.3)


def finish_figure(figure: Any, panels: Any, title: str) -> None:
    """Add one legend for all panels, below them."""
    handles = {label: handle for panel in panels.flat for handle, label in _legend(panel)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle(title, fontsize=10)


def _legend(panel: Any) -> list[tuple[Any, str]]:
    return list(zip(*panel.get_legend_handles_labels(), strict=True))


def short(length: int) -> str:
    """Format a length: 1024 as 1k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
