"""A race of kernels on the screen: progress, tables, files, and an exit code."""

import json
from pathlib import Path

from rich.console import Console

from linattn.lab.bench.kernels.chart import draw_kernels_chart
from linattn.lab.bench.kernels.rows import KernelRow, KernelsResult
from linattn.lab.bench.kernels.run import number_of_kernel_rows, open_run, run_kernels
from linattn.lab.bench.kernels.settings import KernelsConfig
from linattn.lab.bench.kernels.start import run_apart
from linattn.lab.bench.kernels.table import goals_table, kernels_table
from linattn.lab.bench.progress import row_progress
from linattn.lab.bench.screen import INTERRUPTED, RIGHT, WRONG, Files
from linattn.support.extras import need
from linattn.support.files import write_json
from linattn.support.options import OptionError

SAME_TO_RESUME = ("device", "versions")


def measure_kernels(
    config: KernelsConfig, files: Files, *, resume: bool = False, command: list[str] | None = None
) -> KernelsResult:
    """Run with a progress bar on stderr, so that printed results can be piped; every finished row is on disk."""
    config.check()
    if files.chart is not None:
        need("a chart", "matplotlib")
    result = KernelsResult(config.describe(command))
    if resume and files.json.exists():
        take_up(result, files.json)
    open_run(result)
    with row_progress() as progress:
        task = progress.add_task("starting", total=number_of_kernel_rows(config, result))

        def on_row(row: KernelRow) -> None:
            write_json(files.json, result.as_json())
            progress.advance(task)

        def on_work(what: str) -> None:
            progress.update(task, description=what)

        if config.torch_device.type == "cuda":
            run_apart(config, result, on_row=on_row, on_work=on_work)
        else:
            run_kernels(config, result, on_row=on_row, on_work=on_work)
    if result.rows:
        write_json(files.json, result.as_json())  # once more: only now is it known whether the run was interrupted
    return result


def take_up(result: KernelsResult, path: Path) -> None:
    """Take over the rows of an earlier run with the same settings on the same machine."""
    earlier = KernelsResult.from_json(json.loads(path.read_text()))
    wanted = [earlier.meta["settings"][key] == result.meta["settings"][key] for key in ("dtype", "quick", "seed")]
    if not all(wanted) or any(earlier.meta[key] != result.meta[key] for key in SAME_TO_RESUME):
        raise OptionError("resume", f"{path} is of another device, other versions or other settings")
    result.rows, result.cold, result.meta["runs"] = earlier.rows, earlier.cold, earlier.meta["runs"]


def kernels(config: KernelsConfig, files: Files, console: Console, *, resume: bool = False) -> int:
    """Measure, show, draw; returns the exit code: 1 if a row of this library is wrong or failed, 130 after Ctrl-C."""
    result = measure_kernels(config, files, resume=resume)
    console.print(kernels_table(result, console.width))
    outcomes = result.outcomes()
    if outcomes:
        console.print(goals_table(outcomes))
    if result.rows:
        console.print(f"results: {files.json}", soft_wrap=True)
    if files.chart is not None and any(row.over_floor is not None for row in result.rows):
        draw_kernels_chart(result, files.chart)
        console.print(f"chart:   {files.chart}", soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]interrupted: the rows above are complete, --resume measures the rest[/]")
    elif any(row.status == "left out" for row in result.rows):
        console.print("[yellow]some were left out for want of time: --resume measures them[/]")
    if not result.right:
        bad = [f"{r.contender} in {r.case}" for r in result.rows if r.status in ("WRONG", "failed")]
        ours = [text for text in dict.fromkeys(bad) if text.startswith("linattn")]
        console.print(f"[bold red]wrong or failed: {', '.join(ours)}[/]")
    return INTERRUPTED if result.interrupted else RIGHT if result.right else WRONG
