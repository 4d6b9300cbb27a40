"""The chart of memory by the number of tokens."""

from pathlib import Path
from typing import Any

from linattn.lab.bench.blocks.rows import SOFTMAX, SOFTMAX_MAP, BlocksResult
from linattn.lab.bench.chart import COLORS, MARKERS
from linattn.support.extras import need
from linattn.support.files import write_atomically

NOT_MEASURED = ("out of memory", "left out")
FAVOURITE = "nala"  # its paper claims a reduction, which is written into the chart


def draw_blocks_chart(result: BlocksResult, path: Path) -> None:
    """Write the chart as a PNG."""
    figure = blocks_figure(result)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))


def blocks_figure(result: BlocksResult) -> Any:
    """A line per contender on logarithmic axes; what did not fit is a cross at the top."""
    need("a chart", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panel = figure.subplots()
    for i, name in enumerate(result.contenders()):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        peaks = result.peaks(name)
        if peaks:
            panel.plot(list(peaks), [b / 2**20 for b in peaks.values()], color=color, marker=marker, label=name)
        _crosses(panel, result, name, color, height=0.97 - 0.045 * i)
    _finish(panel, result)
    _reductions(panel, result)
    figure.suptitle(setting(result), fontsize=10)
    return figure


def setting(result: BlocksResult) -> str:
    """What was measured, and on which machine."""
    s = result.meta["settings"]
    shape = f"one block, width {s['dim']}, {s['heads']} heads, batch {s['batch']}, {s['precision']}"
    return f"forward + backward of {shape}, {result.meta['device']}"


def annotated(result: BlocksResult) -> str | None:
    """The mechanism whose reductions are written into the chart."""
    names = [name for name in result.contenders() if name not in (SOFTMAX, SOFTMAX_MAP)]
    return FAVOURITE if FAVOURITE in names else next(iter(names), None)


def _crosses(panel: Any, result: BlocksResult, name: str, color: str, height: float) -> None:
    """Draw each contender's crosses in a row of their own, with one label to the left of the first."""
    rows = [row for row in result.rows if row.contender == name and row.status in NOT_MEASURED]
    if not rows:
        return
    at_top = panel.get_xaxis_transform()  # x in tokens, y from 0 at the bottom to 1 at the top
    x = [row.tokens for row in rows]
    panel.plot(x, [height] * len(x), "x", color=color, markersize=9, markeredgewidth=2.5, transform=at_top)
    panel.annotate(
        f"{name}: {rows[0].status}", (x[0], height), xycoords=at_top, xytext=(-9, 0), textcoords="offset points",
        ha="right", va="center", color=color, fontsize=9,
    )  # fmt: skip


def _reductions(panel: Any, result: BlocksResult) -> None:
    name = annotated(result)
    if name is None:
        return
    found = [result.reduction(name, against) for against in (SOFTMAX_MAP, SOFTMAX)]
    lines = [str(reduction) for reduction in found if reduction is not None]
    if lines:
        panel.text(
            0.98, 0.03, "\n".join([f"{name}:", *lines]), transform=panel.transAxes, ha="right", va="bottom",
            fontsize=9, bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#cccccc"},
        )  # fmt: skip
    to_map = found[0]
    if to_map is not None:
        T = to_map.tokens
        ends = [(T, result.peaks(who)[T] / 2**20) for who in (name, SOFTMAX_MAP)]
        panel.annotate("", ends[0], xytext=ends[1], arrowprops={"arrowstyle": "<->", "color": "#888888"})


def _finish(panel: Any, result: BlocksResult) -> None:
    tokens = sorted({row.tokens for row in result.rows})
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(tokens, [f"{T:,}" for T in tokens], rotation=30, ha="right")
    panel.minorticks_off()
    panel.set(xlabel="tokens", ylabel="peak memory, MiB")
    memory = result.meta.get("device_memory_bytes")
    if memory and any(row.status == "out of memory" for row in result.rows):
        panel.axhline(memory / 2**20, color="#999999", linestyle=":", linewidth=1)
        panel.annotate(
            "memory of the GPU", (0.01, memory / 2**20), xycoords=("axes fraction", "data"), va="bottom", fontsize=8,
            color="#666666",
        )  # fmt: skip
    if any(row.status in NOT_MEASURED for row in result.rows):
        low, high = panel.get_ylim()
        panel.set_ylim(low, high * (high / low) ** 0.15)  # room for the crosses above the lines
    panel.grid(alpha=0.3)
    if any(result.peaks(name) for name in result.contenders()):
        panel.legend(fontsize=9, loc="center left")
