"""The base of benchmarks: experiments whose cases give rows with times, each checked in the process that times it.

On a GPU cases run in a worker process, one after the other: what crashes costs its case alone, and cases that follow
one another share what is costly to make (:func:`shared`). What is finished is kept, for this version of the code and
this machine: the same command goes on where time, a crash or Ctrl-C ended it.
"""

import importlib.util
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch

from linattn.lab.bench.check import Verdict
from linattn.lab.bench.running import Row, guarded, load, machine_of, versions
from linattn.lab.cases import Case, Outcome, Work, find, run_cases
from linattn.lab.experiment import FAILED, RIGHT, Experiment, save_results
from linattn.lab.page.plots import Chart, save_png
from linattn.lab.screen import Screen
from linattn.support.config import option
from linattn.support.machine import cores, describe_run
from linattn.support.options import OptionError, check_folder

if TYPE_CHECKING:
    from pandas import DataFrame

Type = Literal["", "float32", "float64", "bfloat16", "float16"]
SOFTMAX = "softmax"
BAD = ("WRONG", "failed", "not on kernels")
UNMEASURED = ("out of memory", "left out", "failed", "absent")
# A process that compiles would start one process a core; and tuning beside others gives wrong results.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Benchmark(Experiment):
    """Options and the run of every benchmark."""

    jobs: int = option(
        0, "Processes that compile beforehand, on a GPU; what is timed runs alone.", group="Machine", least=0,
        affects=False, rare=True, default_text="one a core but two",
    )  # fmt: skip
    threads: int = option(0, "CPU threads; 0 leaves the choice to PyTorch.", group="Machine", least=0, affects=False)
    seconds: float | None = option(
        None, "Begin nothing after so many seconds; the same command goes on.", above=0, affects=False
    )  # fmt: skip
    publish: Path | None = option(
        None, "Folder in which the results and the chart are also written, such as results/cpu.", affects=False
    )  # fmt: skip
    seed: int = option(0, "Seed of weights and inputs.", least=0)

    keys: ClassVar[tuple[str, ...]] = ()
    """What of a case stands in its rows, and in words while it runs."""
    columns: ClassVar[tuple[str, ...]] = ()
    """What of a row is printed."""
    packages: ClassVar[tuple[str, ...]] = ("triton",)
    """Packages whose versions are told."""
    most_seconds: ClassVar[float] = 600.0
    """A case that takes longer is lost."""

    def check(self) -> None:
        self.place()

    def filled(self) -> Self:
        """The config with defaults that depend on the device written out."""
        return replace(self, device=str(self.place()))

    @property
    def on_gpu(self) -> bool:
        return self.place().type == "cuda"

    @property
    def file_name(self) -> str:
        """Name of the published files."""
        return self.name

    def case(self, **axes: Any) -> dict[str, Any]:
        """A case: what is varied, the settings, the machine and the version of the code."""
        return {**axes, "settings": self.filled().values(affecting=True), "on": machine_of(self.place())}

    def title(self, case: Case) -> str:
        return ", ".join(str(case[key]) for key in self.keys)

    def derived(self, rows: list[Row]) -> list[Row]:
        """The rows with what depends on several of them."""
        return rows

    def described(self, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> dict[str, Any]:
        """What ``meta`` says beyond machine, versions and settings."""
        return {}

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        """The charts; the first is published."""
        return []

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Measure a case of this config: its numbers, or a status with a reason. What is raised is its status."""
        raise NotImplementedError

    def warm(self, case: Case) -> None:
        """Compile what :meth:`fill` will run: in several processes, before any case is timed."""

    @classmethod
    def measure(cls, case: Case, work: Work) -> Mapping[str, Any]:
        row: Row = {}
        return guarded(case, row, lambda: cls.parse(case["settings"]).fill(case, work, row))

    @classmethod
    def prepare(cls, case: Case, work: Work) -> Mapping[str, Any]:
        cls.parse(case["settings"]).warm(case)
        return {}

    def bad(self, row: Row) -> bool:
        return row["status"] in BAD

    def rows(self, outcomes: Sequence[Outcome]) -> list[Row]:
        """The rows of all cases that were reached; one that failed has a row with the reason."""
        found = []
        for outcome in (own for own in outcomes if own.reached):
            result = outcome.result or {"status": "failed", "reason": outcome.error}
            named = {key: outcome.case[key] for key in self.keys}
            found += [{**named, "status": "ok", "reason": ""} | row for row in result.get("rows", [result])]
        return self.derived(found)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        cells = [{name: cell(row, name) for name in (*self.columns, "remark")} for row in rows]
        names = [name for name in (*self.columns, "remark") if any(own[name] for own in cells)]
        return [name.replace("_", " ") for name in names], [[own[name] for name in names] for own in cells]

    def run(self, screen: Screen) -> int:
        """The command: compile, measure, save, print, draw. Run again, it goes on where it stopped."""
        check_folder("output", self.folder)
        if self.threads:
            torch.set_num_threads(self.threads)
        begin, config, busy = time.monotonic(), self.filled(), load()
        if busy > 0.3 * cores():
            screen.warn(f"this machine is busy: a load of {busy:.1f} on {cores()} cores; times will be too long")
        cases = config.cases()
        if config.on_gpu:
            config._prepare(screen, cases)
        left = math.inf if self.seconds is None else max(self.seconds - (time.monotonic() - begin), 0.0)
        outcomes = config._measure(screen, cases, left)
        rows = config.rows(outcomes)
        meta = describe_run(config.place()) | {"experiment": self.name, "seed": self.seed, "settings": config.values()}
        meta |= {"load_average": busy, **config.described(outcomes, rows)}
        meta["versions"] |= versions(self.packages)
        save_results(self.folder / "results.json", meta, rows)
        screen.table(f"{self.name}, {meta['device']}", *config.table(rows))
        for sentence in config.sentences(rows):
            screen.say(sentence)
        screen.result({"meta": meta, "rows": rows})
        screen.say(f"results: {config._write(meta, rows)}")
        waiting = sum(not outcome.reached for outcome in outcomes)
        if waiting:
            screen.warn(f"{waiting} of {len(outcomes)} cases are left: the same command goes on")
        bad = [f"{config.title(row)}: {row['status']} {row['reason']}".strip() for row in rows if config.bad(row)]
        if bad:
            screen.warn("\n".join(["wrong or failed:", *bad]))
        return FAILED if bad else RIGHT

    def _measure(self, screen: Screen, cases: Sequence[dict[str, Any]], seconds: float) -> list[Outcome]:
        """Cold starts in fresh processes with a GPU to themselves, then the others."""
        cold = [case for case in cases if case.get("fresh")]
        found: dict[int, Outcome] = {}
        for chosen in (cold, [case for case in cases if case not in cold]):
            outcomes = run_cases(
                chosen, type(self).measure, self.folder / "cases", seconds=seconds, title=self.title,
                where="here" if not self.on_gpu and self.where == "processes" else self.where,
                most_seconds=self.most_seconds, screen=screen,
            ) if chosen else []  # fmt: skip
            found |= {id(case): outcome for case, outcome in zip(chosen, outcomes, strict=True)}
        return [found[id(case)] for case in cases]

    def _prepare(self, screen: Screen, cases: Sequence[dict[str, Any]]) -> None:
        """Fill the caches of Triton and inductor on disk; what fails here is told when it is measured."""
        left = [case for case in cases if not case.get("fresh") and self._open(case)]
        jobs = self.jobs or max(1, cores() - 2)
        if left:
            os.environ.update(ALONE)
            screen.say(f"compiling {len(left)} cases in {jobs} processes")
            limit = math.inf if self.seconds is None else 0.45 * self.seconds
            with tempfile.TemporaryDirectory() as folder:
                run_cases(left, type(self).prepare, Path(folder), where="processes", jobs=jobs, seconds=limit,
                          most_seconds=self.most_seconds, title=self.title,
                          screen=Screen(quiet=True) if screen.quiet else _Mute())  # fmt: skip
            for name in ALONE:
                os.environ.pop(name, None)

    def _open(self, case: Mapping[str, Any]) -> bool:
        return find(self.folder / "cases", case) is None

    def _write(self, meta: Mapping[str, Any], rows: list[Row]) -> Path:
        """The page where what makes it is installed, and what is to be published."""
        page = self.write_page(meta, rows)
        if self.publish is not None:
            save_results(self.publish / f"{self.file_name}.json", meta, rows)
            drawn = any(row["status"] == "ok" for row in rows) and importlib.util.find_spec("matplotlib")
            for chart in self.charts(rows, meta)[:1] if drawn else []:
                save_png(chart, self.publish / f"{self.file_name}.png")
        return page or self.folder / "results.json"

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> list[Any]:
        from pandas import DataFrame

        from linattn.lab.page import Section

        rows: list[Row] = [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in frame.to_dict("records")
        ]
        charts = self.charts(rows, meta) if any(row["status"] == "ok" for row in rows) else []
        names, cells = self.table(rows)
        table = Section("All rows", table=DataFrame(cells, columns=names))
        return [*(Section(chart.title, chart=chart) for chart in charts), table]


class _Mute(Screen):
    """Progress alone: what fails while compiling is told when it is measured."""

    def warn(self, text: str) -> None:
        pass


def cell(row: Mapping[str, Any], name: str) -> str:
    """A value of a row for a table: ``x_MiB`` is ``x_bytes``, ``spread`` half the distance from p20 to p80."""
    value = row.get(name)
    if name == "remark":
        return ": ".join(filter(None, (row["status"], row["reason"]))) if row["status"] != "ok" else row.get("note", "")
    if name == "pass_name":
        return str(value).replace("forward", "fwd").replace("backward", "bwd")
    if name == "spread" and row.get("p80_ms"):
        return f"±{(row['p80_ms'] - row['p20_ms']) / 2 / row['median_ms']:.0%}"
    if name == "budget" and value:
        return f"{row['error'] / value:.0%}"
    for unit, size in (("_MiB", 2**20), ("_GiB", 2**30)):
        if name.endswith(unit):
            value = row.get(name.replace(unit, "_bytes"))
            value = None if value is None else value / size
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def note(row: Row, verdict: Verdict) -> bool:
    """Record a verdict; a row that is wrong is not timed."""
    row |= verdict.row()
    return verdict.ok


def setting(meta: Mapping[str, Any], *words: str) -> str:
    """What was measured and where, for the title of a chart."""
    return ", ".join(filter(None, [*words, str(meta["device"])]))


def only_quick_on_cpu(config: Any, what: str) -> None:
    if not config.on_gpu and not config.quick:
        raise OptionError("device", f"{what} are timed on a GPU; on a CPU use --quick, which shows that it runs")
