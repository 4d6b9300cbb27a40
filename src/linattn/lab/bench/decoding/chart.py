"""The chart of decoding: time per token and memory by the context, a column for each batch size."""

from pathlib import Path
from typing import Any

from linattn.lab.bench.decoding.rows import DecodingResult
from linattn.lab.bench.decoding.settings import EAGER, GRAPH
from linattn.lab.bench.language.chart import (
    draw_crossovers,
    draw_line,
    draw_missing,
    finish_figure,
    finish_panel,
    new_figure,
)
from linattn.lab.bench.language.rows import NOT_MEASURED
from linattn.support.files import write_atomically

MIB = 2**20


def draw_decoding_chart(result: DecodingResult, path: Path) -> bool:
    """Write the chart as a PNG; False, and no file, if nothing was measured."""
    if not any(row.median_ms for row in result.rows):
        return False
    figure = decoding_figure(result)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))
    return True


def decoding_figure(result: DecodingResult) -> Any:
    """Full lines for CUDA graphs if there are any, dashed ones for steps called from Python."""
    batches = sorted({row.batch for row in result.rows})
    figure, panels = new_figure(2, len(batches))
    for column, batch in enumerate(batches):
        modes = [mode for mode in (GRAPH, EAGER) if result_has(result, batch, mode)]
        _times(panels[0][column], result, batch, modes)
        _memory(panels[1][column], result, batch, modes)
    meta, model = result.meta, result.meta["model"]
    shape = f"{model['depth']} layers of {model['width']}, {model['kv_heads']} heads of keys"
    finish_figure(figure, panels, f"decoding, {shape}, {meta['settings']['dtype']}, {meta['device']}")
    return figure


def result_has(result: DecodingResult, batch: int, mode: str) -> bool:
    return any((row.batch, row.mode) == (batch, mode) and row.median_ms for row in result.rows)


def _times(panel: Any, result: DecodingResult, batch: int, modes: list[str]) -> None:
    names = result.mechanisms()
    for line, mode in zip(("-", "--"), modes, strict=False):
        for i, name in enumerate(names):
            label = f"{name}, {mode}" if len(modes) > 1 else name
            draw_line(panel, result.times(name, batch, mode), label, i, linestyle=line, alpha=1 if line == "-" else 0.5)
    if modes:
        setting = f"batch {batch}, {modes[0]}"
        found = [(names.index(c.mechanism), c.length) for c in result.crossovers() if c.setting == setting and c.length]
        draw_crossovers(panel, found, min(_contexts(result)))
        for i, name in enumerate(names):
            draw_missing(panel, *_missing(result, name, batch, modes[0]), i)
    title = f"batch {batch}; dotted: faster than softmax from there on"
    finish_panel(panel, _contexts(result), title, "context", "ms a token")


def _memory(panel: Any, result: DecodingResult, batch: int, modes: list[str]) -> None:
    for i, name in enumerate(result.mechanisms()):
        rows = result.series(name, batch, modes[0]) if modes else []
        draw_line(panel, {r.context: r.total_bytes / MIB for r in rows if r.total_bytes}, "", i)
        states = {r.context: r.state_bytes / MIB for r in rows if r.state_bytes}
        draw_line(panel, states, "", i, linestyle=":", alpha=0.6)
    title = f"batch {batch}: weights, states and a step; dotted: states alone"
    finish_panel(panel, _contexts(result), title, "context", "MiB")


def _missing(result: DecodingResult, name: str, batch: int, mode: str) -> tuple[list[int], str]:
    rows = [
        row for row in result.rows
        if (row.mechanism, row.batch, row.mode) == (name, batch, mode) and row.status in NOT_MEASURED
    ]  # fmt: skip
    return [row.context for row in rows], f"{name}: {rows[0].status}" if rows else ""


def _contexts(result: DecodingResult) -> list[int]:
    return sorted({row.context for row in result.rows})
