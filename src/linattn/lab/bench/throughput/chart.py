"""The chart of training throughput: tokens per second and memory by sequence length."""

from pathlib import Path
from typing import Any

from linattn.lab.bench.language.chart import (
    draw_crossovers,
    draw_line,
    draw_missing,
    finish_figure,
    finish_panel,
    new_figure,
)
from linattn.lab.bench.language.rows import NOT_MEASURED
from linattn.lab.bench.throughput.rows import ThroughputResult
from linattn.support.files import write_atomically


def draw_throughput_chart(result: ThroughputResult, path: Path) -> bool:
    """Write the chart as a PNG; False, and no file, if nothing was measured."""
    if not any(row.median_ms for row in result.rows):
        return False
    figure = throughput_figure(result)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))
    return True


def throughput_figure(result: ThroughputResult) -> Any:
    figure, panels = new_figure(1, 2)
    speed, memory = panels[0]
    names = result.mechanisms()
    for i, name in enumerate(names):
        rows = result.series(name)
        draw_line(speed, {r.length: r.tokens_per_second / 1000 for r in rows if r.tokens_per_second}, name, i)
        draw_line(memory, {r.length: r.peak_bytes / 2**30 for r in rows if r.peak_bytes}, "", i)
        missing = [row for row in result.rows if row.mechanism == name and row.status in NOT_MEASURED]
        draw_missing(speed, [r.length for r in missing], f"{name}: {missing[0].status}" if missing else "", i)
    lengths = sorted({row.length for row in result.rows})
    found = [(names.index(c.mechanism), c.length) for c in result.crossovers() if c.length]
    draw_crossovers(speed, found, min(lengths))
    title = "dotted: faster than softmax from there on"
    finish_panel(speed, lengths, title, "length of sequences", "thousand tokens per second", log=False)
    finish_panel(memory, lengths, "a step, beyond weights and optimiser", "length of sequences", "peak GiB", log=False)
    meta, model = result.meta, result.meta["model"]
    shape = f"{model['depth']} layers of {model['width']}, {meta['settings']['tokens']:,} tokens a step"
    finish_figure(figure, panels, f"training, {shape}, {meta['settings']['dtype']}, {meta['device']}")
    return figure
