"""The chart of a result: time by length, and memory where it was measured."""

from pathlib import Path
from typing import Any

from linattn.lab.bench.rows import Result
from linattn.lab.bench.table import setting
from linattn.support.extras import need
from linattn.support.files import write_atomically

# Colours that are distinct to readers with colour blindness; contenders also differ in their markers.
COLORS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("s", "o", "^", "D", "v", "P", "X")


def draw_chart(result: Result, path: Path, crossover: float | None = None) -> None:
    """Write one panel per pass, with memory below; ``crossover`` is marked in the first panel."""
    need("a chart", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    passes = list(dict.fromkeys(row.pass_name for row in result.rows if row.median_ms is not None))
    weighed = any(row.peak_bytes is not None for row in result.rows)
    lines = 2 if weighed else 1
    figure = Figure(figsize=(6.4 * max(len(passes), 1), 4.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(lines, max(len(passes), 1), squeeze=False)
    for column, pass_name in enumerate(passes):
        _time_panel(panels[0][column], result, pass_name)
        if weighed:
            _memory_panel(panels[1][column], result, pass_name)
    if crossover is not None:
        panels[0][0].axvline(crossover, color="#999999", linestyle=":", linewidth=1)
        panels[0][0].annotate(
            f" faster from T = {crossover:.0f}", (crossover, 0.03), xycoords=("data", "axes fraction"), color="#666666"
        )
    figure.suptitle(setting(result), fontsize=10)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))


def _time_panel(panel: Any, result: Result, pass_name: str) -> None:
    for name, color, marker in _styles(result):
        rows = [r for r in result.rows if (r.contender, r.pass_name, r.status) == (name, pass_name, "ok")]
        if rows:
            x, y = [r.length for r in rows], [r.median_ms for r in rows]
            panel.plot(x, y, color=color, marker=marker, label=name)
            panel.fill_between(x, [r.p20_ms for r in rows], [r.p80_ms for r in rows], color=color, alpha=0.2)
    _finish(panel, result, pass_name, "time of one call, ms")


def _memory_panel(panel: Any, result: Result, pass_name: str) -> None:
    for name, color, marker in _styles(result):
        rows = [r for r in result.rows if (r.contender, r.pass_name, r.status) == (name, pass_name, "ok")]
        points = [(r.length, r.peak_bytes / 2**20) for r in rows if r.peak_bytes is not None]
        if points:
            panel.plot(*zip(*points, strict=True), color=color, marker=marker, label=name)
    _finish(panel, result, pass_name, "peak memory, MiB")


def _styles(result: Result) -> list[tuple[str, str, str]]:
    names = dict.fromkeys(row.contender for row in result.rows)
    return [(name, COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]


def _finish(panel: Any, result: Result, title: str, ylabel: str) -> None:
    lengths = sorted({row.length for row in result.rows})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [str(T) for T in lengths])
    panel.minorticks_off()
    panel.set(title=title, xlabel="sequence length T", ylabel=ylabel)
    panel.grid(alpha=0.3)
    if panel.lines:
        panel.legend(fontsize=9)
