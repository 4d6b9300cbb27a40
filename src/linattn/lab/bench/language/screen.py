"""What the benchmarks of language models share on the screen: progress, files, final words, an exit code."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from linattn.lab.bench.language.apart import Measure, run_apart
from linattn.lab.bench.language.rows import BAD, LanguageResult, LanguageRow
from linattn.lab.bench.language.settings import LanguageConfig
from linattn.lab.bench.progress import row_progress
from linattn.lab.bench.screen import INTERRUPTED, RIGHT, WRONG
from linattn.support.extras import MissingExtraError
from linattn.support.files import write_json
from linattn.support.options import OptionError

COLORS = {"WRONG": "bold red", "failed": "bold red", "out of memory": "yellow", "absent": "dim", "left out": "dim"}


def measure_to_file(
    measure: Measure,
    config: LanguageConfig,
    result: LanguageResult[Any],
    row_type: type[LanguageRow],
    path: Path,
    *,
    resume: bool,
    plan: Callable[[], Sequence[object]],
    before: Callable[[Callable[[str], None]], None] = lambda on_work: None,
) -> None:
    """Run with a progress bar on stderr, so that printed results can be piped; every finished row is on disk."""
    if resume and path.exists():
        take_up(result, config, row_type, path)
    runs = result.meta.setdefault("runs", [])
    runs.append({"date": result.meta["date"], "command": result.meta["command"]})
    with row_progress() as progress:
        task = progress.add_task("starting", total=len(plan()))

        def on_row(row: LanguageRow) -> None:
            write_json(path, result.as_json())
            progress.advance(task)

        def on_work(what: str) -> None:
            progress.update(task, description=what)

        begin = time.perf_counter()
        before(on_work)
        config = replace(config, seconds=max(config.seconds - (time.perf_counter() - begin), 1e-3))
        if config.torch_device.type == "cuda":
            run_apart(measure, config, result, on_row=on_row, on_work=on_work)
        else:
            measure(config, result, on_row=on_row, on_work=on_work)
    if result.rows:
        write_json(path, result.as_json())  # once more: only now is it known whether the run was interrupted


def take_up(result: LanguageResult[Any], config: LanguageConfig, row_type: type[LanguageRow], path: Path) -> None:
    """Take over the rows of an earlier run with the same settings on the same machine."""
    earlier = json.loads(path.read_text())
    same = all(earlier["meta"]["settings"].get(name) == value for name, value in config.comparable().items())
    if not same or any(earlier["meta"][key] != result.meta[key] for key in ("device", "versions")):
        raise OptionError("resume", f"{path} is of another device, other versions or other settings")
    result.take_up(earlier, row_type)


def remark(row: LanguageRow) -> str:
    return "" if row.status == "ok" else f"[{COLORS[row.status]}]{row.status}: {escape(row.reason)}[/]"


def used(row: LanguageRow) -> str:
    """The share of the allowed error that was used."""
    return "" if row.error is None or not row.budget else f"{row.error / row.budget:.0%}"


def form_lines(result: LanguageResult[Any]) -> list[str]:
    """Say which form serves each mechanism's calls of attention."""
    lines = {f"{row.mechanism}: {escape('; '.join(row.explain))}": None for row in result.rows if row.explain}
    return [f"[dim]{line}[/]" for line in lines]


def finish(result: LanguageResult[Any], path: Path, console: Console, draw: Callable[[Any, Path], bool] | None) -> int:
    """Draw the chart, say where the files are and what is missing; returns the exit code."""
    if result.rows:
        console.print(f"results: {path}", soft_wrap=True)
    chart = path.with_suffix(".png")
    try:
        if draw is not None and draw(result, chart):
            console.print(f"chart: {chart}", soft_wrap=True)
    except MissingExtraError as error:  # the results are on disk: a chart can be drawn later
        console.print(f"[yellow]no chart: {escape(str(error))}[/]")
    if result.interrupted:
        console.print("[yellow]interrupted: the rows above are complete, --resume measures the rest[/]")
    elif any(row.status == "left out" for row in result.rows):
        console.print("[yellow]some were left out for want of time: --resume measures them[/]")
    if not result.right:
        bad = "; ".join(str(row) for row in result.rows if row.status in BAD)
        console.print(f"[bold red]wrong or failed: {bad}[/]")
    return INTERRUPTED if result.interrupted else RIGHT if result.right else WRONG
