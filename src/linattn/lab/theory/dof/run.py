"""The experiment, from its settings to its files, and on the screen."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from linattn.lab.pages.frame import write_page
from linattn.lab.theory.dof.activations import random_heads, real_heads
from linattn.lab.theory.dof.charts import ERRORS, WORDS, charts_of, curve, page
from linattn.lab.theory.dof.measure import Row, measure_head
from linattn.lab.theory.dof.settings import DofConfig
from linattn.lab.theory.meta import lab_meta
from linattn.support.extras import need
from linattn.support.files import write_json

RIGHT, WRONG = 0, 1


@dataclass(frozen=True)
class Result:
    meta: dict[str, Any]
    rows: list[Row]

    @property
    def within(self) -> tuple[int, int]:
        """How many errors are within the bound, and how many have a bound."""
        checked = [
            error <= bound
            for row in self.rows
            for errors, bound in ((row.kernel_error, row.kernel_bound), (row.sum_error, row.sum_bound))
            if bound is not None
            for error in errors
        ]
        return sum(checked), len(checked)

    @property
    def passed(self) -> bool:
        """Whether the bound holds as often as it should."""
        right, all_ = self.within
        return right >= (1 - 2 * self.meta["settings"]["delta"]) * all_

    def summary(self) -> str:
        words = []
        for source in dict.fromkeys(row.source for row in self.rows):
            rows = [row for row in self.rows if row.source == source]
            ends = {words: curve(rows, sampling, "kernel")[-1] for sampling, words in WORDS.items()}
            errors = " and ".join(f"{end[1]:.2g} by {name}" for name, end in ends.items())
            degrees = [row.degrees for row in rows]
            words.append(
                f"On {source} activations ({min(degrees):.1f} to {max(degrees):.1f} degrees of freedom) "
                f"{max(row.count for row in rows)} features leave a kernel error of {errors}."
            )
        right, all_ = self.within
        return " ".join([*words, f"{right} of {all_} errors lie within the bound."])

    def as_dict(self) -> dict[str, Any]:
        return {"meta": self.meta, "summary": self.summary(), "rows": [row.as_dict() for row in self.rows]}


def run_dof(config: DofConfig, on_work: Callable[[str], None], command: list[str] | None = None) -> Result:
    """Measure random activations, then real ones if there are any."""
    config.check()
    meta = lab_meta(config, "cpu", command)
    on_work("activations")
    heads = random_heads(config) + (real_heads(config) if config.activations else [])
    rows: list[Row] = []
    for head in heads:
        on_work(f"{head.source}, {head.name}")
        rows += measure_head(head, config)
    return Result(meta, rows)


def save(result: Result, folder: Path, name: str, charts: bool = True) -> list[Path]:
    """Write ``<name>.json`` and, with charts, ``<name>-<source>.png`` and the page ``<name>.html``."""
    written = [folder / f"{name}.json"]
    write_json(written[0], result.as_dict())
    if not charts:
        return written
    drawn = charts_of(result.rows)
    pictures = {f"{name}{chart.name.removeprefix('dof')}.png": chart for chart in drawn}
    text = page(result.meta, result.rows, drawn, result.summary())
    return [*written, *write_page(folder / f"{name}.html", text, pictures)]


def dof_on_screen(config: DofConfig, folder: Path, name: str, charts: bool, console: Console) -> int:
    """Run, show, write; returns the exit code: 1 if the bound fails more often than it may."""
    if charts:
        need("charts and the page", "matplotlib")
    with console.status("starting") as status:
        result = run_dof(config, status.update)
    for source in dict.fromkeys(row.source for row in result.rows):
        console.print(_table(source, [row for row in result.rows if row.source == source]))
    console.print(result.summary(), soft_wrap=True, highlight=False)
    for path in save(result, folder, name, charts):
        console.print(f"written: {path}", soft_wrap=True)
    return RIGHT if result.passed else WRONG


def _table(source: str, rows: list[Row]) -> Table:
    shown = Table(title=f"Errors on {source} activations: geometric mean (lowest, highest)", title_justify="left")
    shown.add_column("features", justify="right")
    for name in ERRORS:
        for words in WORDS.values():
            shown.add_column(f"{name}, {words}", justify="right")
    curves = [curve(rows, sampling, name) for name in ERRORS for sampling in WORDS]
    for points in zip(*curves, strict=True):
        cells = [f"{mean:.2g} ({low:.2g}, {high:.2g})" for _, mean, low, high in points]
        shown.add_row(str(points[0][0]), *cells)
    return shown
