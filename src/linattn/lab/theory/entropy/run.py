"""The experiment, from its settings to its files, and on the screen."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from linattn.lab.page.numbers import listed
from linattn.lab.pages.frame import write_page
from linattn.lab.theory.entropy.activations import Activations, random_activations
from linattn.lab.theory.entropy.charts import Curve, charts_of, curves_of
from linattn.lab.theory.entropy.hosts import host_activations
from linattn.lab.theory.entropy.measure import Row, measure
from linattn.lab.theory.entropy.page import page
from linattn.lab.theory.entropy.pretrained import text_activations
from linattn.lab.theory.entropy.sequences import Check, sequence_checks
from linattn.lab.theory.entropy.settings import EntropyConfig
from linattn.lab.theory.entropy.theorems import attention_checks
from linattn.lab.theory.meta import lab_meta
from linattn.support.extras import need
from linattn.support.files import write_json

RIGHT, WRONG = 0, 1
OnWork = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """All numbers. Real activations are those of the first host, and every mechanism is measured on them."""

    meta: dict[str, Any]
    checks: list[Check]
    rows: list[Row]

    @property
    def random(self) -> dict[str, Curve]:
        return curves_of(self.rows, lambda row: row.source == "random")

    @property
    def real(self) -> dict[str, Curve]:
        return curves_of(self.rows, lambda row: row.source != "random" and not row.trained)

    @property
    def trained(self) -> dict[str, Curve]:
        return curves_of(self.rows, lambda row: row.trained)

    @property
    def source(self) -> str:
        return next((row.source for row in self.rows if row.source != "random"), "")

    @property
    def left_out(self) -> dict[str, str]:
        return {f"{row.mechanism}, {row.source}": row.reason for row in self.rows if row.reason}

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def summary(self) -> str:
        """The findings in two sentences."""
        right = sum(check.passed for check in self.checks)
        words = [f"{right} of {len(self.checks)} checks hold."]
        for title, curves in (("random activations", self.random), ("real ones", self.real)):
            if curves:
                blind = [name for name, curve in curves.items() if curve.kind == "blind"]
                who = listed(blind) if blind else "none"
                words.append(f"On {title} {len(blind)} of {len(curves)} are blind to the norm of the query: {who}.")
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        checks, rows = ([part.as_dict() for part in parts] for parts in (self.checks, self.rows))
        return {"meta": self.meta, "summary": self.summary(), "checks": checks, "rows": rows}


def run_entropy(config: EntropyConfig, on_work: OnWork, command: list[str] | None = None) -> Result:
    """Run the checks, and measure every mechanism on random and real activations, and as it was trained."""
    config.check()
    meta = lab_meta(config, config.device, command)
    hosts: list[list[Activations]] = []  # first, since hosts are what may not fit into memory
    if config.reads_text:
        hosts = text_activations(config)
    elif config.hosts:
        hosts = host_activations(config, on_work)
    on_work("checking theorems")
    random = random_activations(config)
    checks = sequence_checks(config.seed) + attention_checks(random, config.seed)
    rows = _measure_all(config, [random], on_work)
    if hosts:
        rows += _measure_all(config, hosts[0], on_work)
    for layers in hosts:
        owned = [layer for layer in layers if layer.own is not None]
        rows += [measure(_name(layer), layer, config.scales, trained=True) for layer in owned]
    return Result(meta, checks, rows)


def _measure_all(config: EntropyConfig, layers: list[Activations], on_work: OnWork) -> list[Row]:
    rows = []
    for name in config.names:
        on_work(f"{name} on {layers[0].source}")
        rows += [measure(name, layer, config.scales, seed=config.seed) for layer in layers]
    return rows


def _name(layer: Activations) -> str:
    assert layer.own is not None
    return layer.own.info.name


def save(result: Result, folder: Path, name: str, charts: bool = True) -> list[Path]:
    """Write ``<name>.json`` and, with charts, the PNG files ``<name>-*.png`` and the page ``<name>.html``."""
    written = [folder / f"{name}.json"]
    write_json(written[0], result.as_dict())
    if not charts:
        return written
    need("charts and the page", "matplotlib")
    groups = {"Random activations": result.random, "Real activations": result.real, "As trained": result.trained}
    names = list(dict.fromkeys(mechanism for curves in groups.values() for mechanism in curves))
    drawn = charts_of(names, result.random, result.real, result.trained, result.source, result.checks)
    text = page(result.meta, result.summary(), result.checks, drawn, groups, result.left_out)
    pictures = {f"{name}{chart.name.removeprefix('entropy')}.png": chart for chart in drawn}
    return [*written, *write_page(folder / f"{name}.html", text, pictures)]


def entropy_on_screen(config: EntropyConfig, folder: Path, name: str, charts: bool, console: Console) -> int:
    """Run, show, write; returns the exit code: 1 if a check fails."""
    if charts:
        need("charts and the page", "matplotlib")
    with console.status("starting") as status:
        result = run_entropy(config, lambda what: status.update(what))
    for check in result.checks:
        verdict = "[green]pass[/]" if check.passed else "[bold red]FAIL[/]"
        numbers = ", ".join(f"{key}: {value:.3g}" for key, value in check.numbers.items())
        console.print(f"{verdict}  {check.statement}\n      [dim]{numbers}[/]", soft_wrap=True, highlight=False)
    for title, curves in (("random", result.random), (result.source, result.real), ("as trained", result.trained)):
        if curves:
            console.print(_table(title, curves, config.scales))
    console.print(result.summary(), soft_wrap=True, highlight=False)
    for path in save(result, folder, name, charts):
        console.print(f"written: {path}", soft_wrap=True)
    return RIGHT if result.passed else WRONG


def _table(title: str, curves: dict[str, Curve], scales: tuple[float, ...]) -> Table:
    ordered = sorted(scales)
    shown = Table(title=f"PSE in nats, {title}", title_justify="left")
    shown.add_column("mechanism")
    heads = [f"q x {ordered[0]:g}", "q", f"q x {ordered[-1]:g}", "correlation", "longer is"]
    for head in heads:
        shown.add_column(head, justify="right")
    for name, curve in curves.items():
        numbers = (curve.pse[0], curve.pse[ordered.index(1.0)], curve.pse[-1])
        correlation = "" if curve.correlation is None else f"{curve.correlation:+.2f}"
        shown.add_row(name, *(f"{value:.3f}" for value in numbers), correlation, curve.kind)
    return shown
