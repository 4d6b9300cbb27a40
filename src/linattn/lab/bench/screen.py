"""A benchmark on the screen: progress, tables, files, and an exit code."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from linattn.lab.bench.chart import draw_chart
from linattn.lab.bench.progress import row_progress
from linattn.lab.bench.rows import Result, Row
from linattn.lab.bench.run import number_of_rows, run_bench
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.store import describe_run, save_result
from linattn.lab.bench.table import growth_table, result_table
from linattn.support.extras import need

RIGHT, WRONG, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Files:
    """Where a run writes its results."""

    json: Path
    chart: Path | None

    @classmethod
    def in_folder(cls, folder: Path, name: str, chart: bool) -> "Files":
        return cls(folder / f"{name}.json", folder / f"{name}.png" if chart else None)


def measure(config: BenchConfig, files: Files, command: list[str] | None = None) -> Result:
    """Run with a progress bar on stderr, so that printed results can be piped; every finished row is on disk."""
    config.check()
    if files.chart is not None:
        need("a chart", "matplotlib")
    result = Result(describe_run(config, command))
    with row_progress() as progress:
        task = progress.add_task("starting", total=number_of_rows(config))

        def on_row(row: Row) -> None:
            save_result(result, files.json)
            progress.advance(task)

        run_bench(config, result, on_row=on_row, on_work=lambda what: progress.update(task, description=what))
    if result.rows:
        save_result(result, files.json)  # once more: only now is it known whether the run was interrupted
    return result


def show(result: Result, console: Console) -> None:
    for pass_name in dict.fromkeys(row.pass_name for row in result.rows):
        console.print(result_table(result, pass_name, console.width))
    if result.growth():
        console.print(growth_table(result))


def bench(config: BenchConfig, files: Files, console: Console) -> int:
    """Measure, show, draw; returns the exit code: 1 if a row is wrong or failed, 130 after Ctrl-C."""
    result = measure(config, files)
    show(result, console)
    if result.rows:
        console.print(f"results: {files.json}", soft_wrap=True)
    if files.chart is not None and any(row.median_ms is not None for row in result.rows):
        draw_chart(result, files.chart)
        console.print(f"chart:   {files.chart}", soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]interrupted: the rows above are complete, the rest was not measured[/]")
    if not result.right:
        bad = [f"{row.contender} at T={row.length}" for row in result.rows if row.status in ("WRONG", "failed")]
        console.print(f"[bold red]wrong or failed: {', '.join(dict.fromkeys(bad))}[/]")
    return INTERRUPTED if result.interrupted else RIGHT if result.right else WRONG
