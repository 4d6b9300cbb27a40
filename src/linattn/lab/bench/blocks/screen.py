"""The command on the screen for memory by tokens: progress, a table, files, and an exit code."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linattn.lab.bench.blocks.chart import draw_blocks_chart, setting
from linattn.lab.bench.blocks.rows import SOFTMAX, SOFTMAX_MAP, BlockRow, BlocksResult
from linattn.lab.bench.blocks.run import number_of_block_rows, run_blocks
from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.lab.bench.progress import row_progress
from linattn.lab.bench.screen import INTERRUPTED, RIGHT, WRONG, Files
from linattn.support.extras import need
from linattn.support.files import write_json

COLORS = {"WRONG": "bold red", "failed": "bold red", "out of memory": "yellow", "left out": "dim"}


def measure_blocks(config: BlocksConfig, files: Files, command: list[str] | None = None) -> BlocksResult:
    """Run with a progress bar on stderr, so that printed results can be piped; every finished row is on disk."""
    config.check()
    if files.chart is not None:
        need("a chart", "matplotlib")
    result = BlocksResult(config.describe(command))
    with row_progress() as progress:
        task = progress.add_task("starting", total=number_of_block_rows(config))

        def on_row(row: BlockRow) -> None:
            write_json(files.json, result.as_json())
            progress.advance(task)

        run_blocks(config, result, on_row=on_row, on_work=lambda what: progress.update(task, description=what))
    if result.rows:
        write_json(files.json, result.as_json())  # once more: only now is it known whether the run was interrupted
    return result


def memory(config: BlocksConfig, files: Files, console: Console) -> int:
    """Measure, show, draw; returns the exit code: 1 if a row is wrong or failed, 130 after Ctrl-C."""
    result = measure_blocks(config, files)
    console.print(blocks_table(result))
    for reduction in result.reductions():
        console.print(f"{reduction.contender}: {reduction}", highlight=False)
    if result.rows:
        console.print(f"results: {files.json}", soft_wrap=True)
    if files.chart is not None and any(row.peak_bytes is not None for row in result.rows):
        draw_blocks_chart(result, files.chart)
        console.print(f"chart:   {files.chart}", soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]interrupted: the rows above are complete, the rest was not measured[/]")
    if not result.right:
        bad = [f"{row.contender} at {row.tokens} tokens" for row in result.rows if row.status in ("WRONG", "failed")]
        console.print(f"[bold red]wrong or failed: {', '.join(bad)}[/]")
    return INTERRUPTED if result.interrupted else RIGHT if result.right else WRONG


def blocks_table(result: BlocksResult) -> Table:
    """Columns ``of softmax``, ``of map``: peak over theirs; ``budget``: the share that the check's error used."""
    table = Table(title=setting(result), title_justify="left", box=SIMPLE_HEAD)
    for header in ("tokens", "contender", "peak MiB", f"of {SOFTMAX}", "of map", "ms", "budget", ""):
        table.add_column(header, justify="left" if header in ("contender", "") else "right", no_wrap=header != "")
    last = {row.tokens: row for row in result.rows}
    for row in result.rows:
        table.add_row(*_cells(row, result), end_section=last[row.tokens] is row)
    if any(row.status == "left out" for row in result.rows):
        table.caption = "left out by predicted cost; --max-seconds and --max-gib move the limits"
        table.caption_justify = "left"
    return table


def _cells(row: BlockRow, result: BlocksResult) -> list[str]:
    first_sentence = escape(row.reason.split(". ")[0])
    remark = "" if row.status == "ok" else f"[{COLORS[row.status]}]{row.status}: {first_sentence}[/]"
    checked = "" if row.error is None or not row.budget else f"{row.error / row.budget:.0%}"
    if row.peak_bytes is None or row.seconds is None:
        return [str(row.tokens), row.contender, "", "", "", "", checked, remark]
    shares = [_share(row, result.peaks(against)) for against in (SOFTMAX, SOFTMAX_MAP)]
    peak, time = f"{row.peak_bytes / 2**20:,.1f}", f"{row.seconds * 1000:.4g}"
    return [str(row.tokens), row.contender, peak, *shares, time, checked, remark]


def _share(row: BlockRow, peaks: dict[int, int]) -> str:
    other = peaks.get(row.tokens)
    return "" if other is None or row.peak_bytes is None else f"{row.peak_bytes / other:.3g}x"
