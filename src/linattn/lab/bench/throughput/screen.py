"""The benchmark of training throughput on the screen: progress, a table, crossovers, files, an exit code."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from linattn.lab.bench.language.screen import finish, form_lines, measure_to_file, remark, used
from linattn.lab.bench.models.cases import SOFTMAX
from linattn.lab.bench.throughput.chart import draw_throughput_chart
from linattn.lab.bench.throughput.rows import ThroughputResult, ThroughputRow
from linattn.lab.bench.throughput.run import plan_of, run_throughput
from linattn.lab.bench.throughput.settings import ThroughputConfig
from linattn.lab.bench.throughput.start import warm_throughput


def measure_throughput(
    config: ThroughputConfig, path: Path, *, resume: bool = False, command: list[str] | None = None
) -> ThroughputResult:
    """Run the benchmark, with every finished row on disk."""
    config.check()
    result = ThroughputResult(config.describe(command))
    measure_to_file(
        run_throughput, config, result, ThroughputRow, path, resume=resume, plan=lambda: plan_of(config, result),
        before=lambda on_work: warm_throughput(config, result, on_work),
    )  # fmt: skip
    return result


def throughput(
    config: ThroughputConfig, path: Path, console: Console, *, resume: bool = False, chart: bool = True
) -> int:
    """Measure, show, draw; returns the exit code: 1 if a row is wrong or failed, 130 after Ctrl-C."""
    result = measure_throughput(config, path, resume=resume)
    console.print(throughput_table(result))
    for line in [*map(str, result.crossovers()), *form_lines(result)]:
        console.print(line, soft_wrap=True, highlight=False)
    return finish(result, path, console, draw_throughput_chart if chart else None)


def throughput_table(result: ThroughputResult) -> Table:
    """The table with a line for each length and mechanism."""
    settings = result.meta["settings"]
    title = f"training, {settings['tokens']:,} tokens a step, {settings['dtype']}, {result.meta['device']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("length", "batch", "mechanism", "ms a step", "tokens/s", "of softmax", "peak GiB", "budget", ""):
        table.add_column(header, justify="left" if header in ("mechanism", "") else "right", no_wrap=header != "")
    order, softmax = result.mechanisms(), result.times(SOFTMAX)
    rows = sorted(result.rows, key=lambda row: (row.length, order.index(row.mechanism)))
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].length != row.length
        names = [f"{row.length:,}", str(row.batch), row.mechanism]
        table.add_row(*names, *_cells(row, softmax.get(row.length)), end_section=last)
    return table


def _cells(row: ThroughputRow, softmax: float | None) -> list[str]:
    if row.median_ms is None or row.tokens_per_second is None:
        return ["", "", "", "", used(row), remark(row)]
    share = "" if softmax is None or row.mechanism == SOFTMAX else f"{row.median_ms / softmax:.2f}x"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.3g}"
    return [f"{row.median_ms:.4g}", f"{row.tokens_per_second:,.0f}", share, peak, used(row), remark(row)]
