"""The laboratory on the screen: progress, a table, files, and an exit code."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from linattn.lab.pages.frame import write_page
from linattn.lab.theory.icl.case import TITLES
from linattn.lab.theory.icl.charts import charts_of
from linattn.lab.theory.icl.page import page
from linattn.lab.theory.icl.rows import Result, earlier_rows
from linattn.lab.theory.icl.run import new_result, run_unit, steps_of
from linattn.lab.theory.icl.settings import IclConfig
from linattn.lab.theory.icl.words import place, summary
from linattn.support.extras import need

RIGHT, WRONG, INTERRUPTED = 0, 1, 130
SHOWN = 8  # runs beyond the tolerance that are named


def icl_on_screen(
    config: IclConfig, folder: Path, name: str, console: Console, *, resume: bool = False, charts: bool = True
) -> int:
    """Train, show, write; 1 if a model is farther from its formula than the tolerance, 130 after Ctrl-C."""
    config.check()
    if charts:
        need("charts and the page", "matplotlib")
    path = folder / f"{name}.json"
    result = new_result(config)
    if resume:
        result.rows = earlier_rows(path, result.meta["settings"])
    _train(config, result, path)
    if not result.rows:
        console.print("interrupted before anything was finished")
        return INTERRUPTED
    for table in result_tables(result):
        console.print(table)
    for line in summary(result):
        console.print(line, soft_wrap=True, highlight=False)
    for written in [path, *(save_page(result, folder, name) if charts else [])]:
        console.print(f"written: {written}", soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]interrupted: what is finished was kept, --resume goes on[/]")
        return INTERRUPTED
    for row in result.beyond[:SHOWN]:
        words = f"beyond the tolerance: {row.model}, {place(row)}: {100 * row.deviation:+.2f} %"
        console.print(f"[bold red]{words}[/]", soft_wrap=True, highlight=False)
    if len(result.beyond) > SHOWN:
        console.print(f"[bold red]and {len(result.beyond) - SHOWN} more[/]", highlight=False)
    return WRONG if result.beyond else RIGHT


def _train(config: IclConfig, result: Result, path: Path) -> None:
    """Train every unit that is not there yet; the file always holds all finished ones."""
    left = [unit for unit in config.units if unit not in result.done]
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    # On stderr, so that printed results can be piped.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=sum(steps_of(config, family) for family, _ in left))
        try:
            for family, model in left:
                progress.update(task, description=f"{family}, {model}")
                result.rows += run_unit(config, family, model, lambda: progress.advance(task))
                result.save(path)
        except KeyboardInterrupt:
            result.interrupted = True
            if result.rows:
                result.save(path)
        else:
            result.save(path)


def save_page(result: Result, folder: Path, name: str) -> list[Path]:
    """``<name>-<figure>.png`` and ``<name>.html``."""
    charts = {f"{name}{chart.name.removeprefix('icl')}.png": chart for chart in charts_of(result)}
    return write_page(folder / f"{name}.html", page(result), charts)


def result_tables(result: Result) -> Iterator[Table]:
    """One table per family: the risk of trained models, best over seeds, and the run farthest from the formula."""
    lengths = sorted({row.n for row in result.rows})
    for family in dict.fromkeys(row.family for row in result.rows):
        table = Table(title=f"{TITLES[family]}: risk / d", title_justify="left", box=None, pad_edge=False)
        table.add_column("case", no_wrap=True)
        table.add_column("model", no_wrap=True)
        for n in lengths:
            table.add_column(f"n = {n}", justify="right", no_wrap=True)
        table.add_column("from formula", justify="right", no_wrap=True)
        for case, model in dict.fromkeys((row.case, row.model) for row in result.select(family=family)):
            rows = result.select(family=family, case=case, model=model)
            risks = (min(row.trained for row in rows if row.n == n) for n in lengths)
            worst = max((row.deviation for row in rows), key=abs)
            table.add_row(case, model, *(f"{risk:.3f}" for risk in risks), f"{100 * worst:+.1f} %")
        yield table
