"""The decoding benchmark on the screen: progress, tables, crossovers, files, and an exit code."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from linattn.lab.bench.decoding.chart import draw_decoding_chart
from linattn.lab.bench.decoding.rows import DecodingResult, DecodingRow
from linattn.lab.bench.decoding.run import plan_of, run_decoding
from linattn.lab.bench.decoding.settings import DecodingConfig
from linattn.lab.bench.decoding.start import warm_decoding
from linattn.lab.bench.language.screen import finish, form_lines, measure_to_file, remark, used
from linattn.lab.bench.models.cases import SOFTMAX


def measure_decoding(
    config: DecodingConfig, path: Path, *, resume: bool = False, command: list[str] | None = None
) -> DecodingResult:
    """Run the benchmark, with every finished row on disk."""
    config.check()
    result = DecodingResult(config.describe(command))
    measure_to_file(
        run_decoding, config, result, DecodingRow, path, resume=resume, plan=lambda: plan_of(config, result),
        before=lambda on_work: warm_decoding(config, result, on_work),
    )  # fmt: skip
    return result


def decoding(config: DecodingConfig, path: Path, console: Console, *, resume: bool = False, chart: bool = True) -> int:
    """Measure, show, draw; returns the exit code: 1 if a row is wrong or failed, 130 after Ctrl-C."""
    result = measure_decoding(config, path, resume=resume)
    for batch, mode in result.settings():
        console.print(decoding_table(result, batch, mode))
    for line in [*summary_lines(result), *form_lines(result)]:
        console.print(line, soft_wrap=True, highlight=False)
    return finish(result, path, console, draw_decoding_chart if chart else None)


def decoding_table(result: DecodingResult, batch: int, mode: str) -> Table:
    """The table with a line for each context and mechanism."""
    settings = result.meta["settings"]
    title = f"batch {batch}, {mode}: {settings['dtype']}, {result.meta['device']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in (
        "context",
        "mechanism",
        "ms a token",
        "tokens/s",
        "of softmax",
        "state MiB",
        "total MiB",
        "budget",
        "",
    ):
        table.add_column(
            header,
            justify="left" if header in ("mechanism", "") else "right",
            no_wrap=header != "",
            min_width=max(map(len, result.mechanisms()), default=None) if header == "mechanism" else None,
        )
    rows = [row for row in result.rows if (row.batch, row.mode) == (batch, mode)]
    order = result.mechanisms()
    rows.sort(key=lambda row: (row.context, order.index(row.mechanism)))
    softmax = result.times(SOFTMAX, batch, mode)
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].context != row.context
        table.add_row(f"{row.context:,}", row.mechanism, *_cells(row, softmax.get(row.context)), end_section=last)
    return table


def _cells(row: DecodingRow, softmax: float | None) -> list[str]:
    if row.median_ms is None or row.tokens_per_second is None:
        return ["", "", "", mib(row.state_bytes), "", used(row), remark(row)]
    share = "" if softmax is None or row.mechanism == SOFTMAX else f"{row.median_ms / softmax:.2f}x"
    speed = f"{row.tokens_per_second:,.0f}"
    return [f"{row.median_ms:.3g}", speed, share, mib(row.state_bytes), mib(row.total_bytes), used(row), remark(row)]


def summary_lines(result: DecodingResult) -> list[str]:
    """Say where each mechanism becomes faster than softmax, and how flat it is."""
    lines = [str(crossover) for crossover in result.crossovers()]
    for own in result.growth():
        first, last = own["contexts"]
        lines.append(
            f"{own['mechanism']}, batch {own['batch']}, {own['mode']}: from {first:,} to {last:,} tokens time x "
            f"{own['time']:.2f}, state x {own['state']:.3g}, memory x {own['memory']:.3g}"
        )
    return lines


def mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.4g}"
