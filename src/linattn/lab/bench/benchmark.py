"""The base of benchmarks: experiments whose cases give rows with times, each checked in the process that times it.

On a GPU cases run in a worker process, one after the other: what crashes costs its case alone, and cases that follow
one another share what is costly to make (:func:`shared`). What is finished is kept, for this version of the code and
this machine: the same command goes on where time, a crash or Ctrl-C ended it.
"""

import gc
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch

from linattn.lab.bench.check import Verdict
from linattn.lab.bench.series import panel
from linattn.lab.bench.timing import Unmeasured
from linattn.lab.cases import Case, Outcome, Work
from linattn.lab.experiment import FAILED, RIGHT, Experiment, save_results
from linattn.lab.page.plots import Chart, save_png, styles
from linattn.lab.screen import Screen
from linattn.support.config import digest, option
from linattn.support.machine import PACKAGE, cores, describe_run, device_name, source_digest
from linattn.support.options import OptionError, check_folder

if TYPE_CHECKING:
    from pandas import DataFrame

Row = dict[str, Any]
Made = TypeVar("Made")
Type = Literal["", "float32", "float64", "bfloat16", "float16"]
SOFTMAX = "softmax"
FORWARD, TRAINING = "forward", "forward+backward"
BAD = ("WRONG", "failed", "not on kernels")
MEASURED_CODE = ("ops", "kernels", "mechanisms", "layers", "models")
BROKEN = 75  # exit code of a process whose GPU no longer responds


class Lines(NamedTuple):
    """A chart: a line a ``name`` over ``length``, and a panel for each value and each group of rows alike in ``split``.

    ``values``: the key in a row, what it is called, and its unit.
    """

    name: str
    length: str
    values: tuple[tuple[str, str, float], ...] = (("median_ms", "ms", 1), ("peak_bytes", "peak MiB", 2**20))
    split: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Benchmark(Experiment):
    """Options and the run of every benchmark; one is a file with the fields of its config, and these methods."""

    jobs: int = option(1, "What is timed runs alone.", affects=False, hidden=True)
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
    lines: ClassVar[Lines] = Lines("", "")
    """What is drawn."""
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
        """A case: what is varied, the settings, and what speed depends on besides: the machine, the code."""
        machine = {"device": device_name(self.place()), "torch": torch.__version__, "threads": torch.get_num_threads()}
        return {**axes, "settings": self.filled().values(affecting=True), "on": machine | {"code": _code()}}

    def title(self, case: Case) -> str:
        return ", ".join(str(case[key]) for key in self.keys)

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Measure a case of this config. What is raised is its status."""
        raise NotImplementedError

    def derived(self, rows: list[Row]) -> list[Row]:
        """The rows with what depends on several of them."""
        return rows

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What ``meta`` says beyond machine, versions and settings."""
        return {}

    def chart(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> Chart | None:
        """What is shown and published; None if there is nothing to draw."""
        name, length, values, split = self.lines
        looks = styles(list(dict.fromkeys(row[name] for row in rows if row.get(name))))
        panels = []
        for value, ylabel, unit in values:
            for kind in dict.fromkeys(tuple(row[key] for key in split) for row in rows):
                own = [row for row in rows if row.get(name) and tuple(row[key] for key in split) == kind]
                if any(row.get(value) for row in own):
                    title = ", ".join(map(str, kind)) or ylabel
                    panels.append(panel(own, name, length, value, title, ylabel, looks, unit))
        title, reading = f"{self.name}, {meta['device']}", "Crosses: what could not be measured."
        right = any(row["status"] == "ok" for row in rows)
        return Chart(self.name, title, reading, panels, looks) if right and panels else None

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The form that serves each mechanism, where rows tell it."""
        texts = (f"{row['mechanism']}: {'; '.join(row['explain'])}" for row in rows if row.get("explain"))
        return list(dict.fromkeys(texts))

    def bad(self, row: Row) -> bool:
        return row["status"] in BAD

    @classmethod
    def measure(cls, case: Case, work: Work) -> Mapping[str, Any]:
        row, config = Row(), cls.parse(case["settings"])
        torch.set_num_threads(case["on"]["threads"])
        guarded(row, config.place(), lambda: config.fill(case, work, row))
        return row

    def rows(self, outcomes: Sequence[Outcome]) -> list[Row]:
        """The rows of all cases that were reached; one that failed has a row with the reason."""
        found = []
        for outcome in (own for own in outcomes if own.reached):
            result = outcome.result or {"status": "failed", "reason": outcome.error}
            named = {key: outcome.case[key] for key in self.keys}
            found.append({**named, "status": "ok", "reason": ""} | result)
        return self.derived(found)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        cells = [{name: cell(row, name) for name in (*self.columns, "remark")} for row in rows]
        names = [name for name in (*self.columns, "remark") if any(own[name] for own in cells)]
        return [name.replace("_", " ") for name in names], [[own[name] for name in names] for own in cells]

    def run(self, screen: Screen) -> int:
        """The command: measure, save, print, draw. Run again, it goes on where it stopped."""
        check_folder("output", self.folder)
        if self.threads:
            torch.set_num_threads(self.threads)
        config, busy = self.filled(), round(os.getloadavg()[0], 2)
        if busy > 0.3 * cores():
            screen.warn(f"this machine is busy: a load of {busy:.1f} on {cores()} cores; times will be too long")
        where = "here" if not config.on_gpu and self.where == "processes" else self.where
        rules = {"where": where, "most_seconds": self.most_seconds, "seconds": self.seconds or math.inf}
        outcomes = config.outcomes(screen, config.cases(), **rules)
        rows = config.rows(outcomes)
        meta = describe_run(config.place()) | {"experiment": self.name, "seed": self.seed, "settings": config.values()}
        meta |= {"load_average": busy, **config.described(rows)}
        meta["versions"] |= {name: version_of(name) for name in self.packages}
        config.show(screen, meta, rows, rows, config.sentences(rows))
        if self.publish is not None:
            save_results(self.publish / f"{config.file_name}.json", meta, rows)
            if find_spec("matplotlib") and (chart := config.chart(rows, meta)):
                save_png(chart, self.publish / f"{config.file_name}.png")
        waiting = sum(not outcome.reached for outcome in outcomes)
        if waiting:
            screen.warn(f"{waiting} of {len(outcomes)} cases are left: the same command goes on")
        bad = [f"{config.title(row)}: {row['status']} {row['reason']}".strip() for row in rows if config.bad(row)]
        if bad:
            screen.warn("\n".join(["wrong or failed:", *bad]))
        return FAILED if bad else RIGHT

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> list[Any]:
        from pandas import DataFrame

        from linattn.lab.page import Section

        rows: list[Row] = frame.astype(object).where(frame.notna(), None).to_dict("records")
        chart, (names, cells) = self.chart(rows, meta), self.table(rows)
        table = Section("All rows", table=DataFrame(cells, columns=names))
        return [*([Section(chart.title, chart=chart)] if chart else []), table]


def guarded(row: Row, device: torch.device, work: Callable[[], None]) -> None:
    """Let ``work`` fill a row; what cannot be measured becomes its status, and a failure is raised.

    With a GPU that no longer responds every further call would fail: the process ends, and others get a new one.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            work()
    except OptionError:
        raise
    except Unmeasured as reason:
        row |= {"status": reason.status, "reason": one_line(reason)}
    except Exception as error:
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)):
            if device.type == "cuda":
                try:
                    torch.zeros(1, device=device).item()
                except Exception:
                    os._exit(BROKEN)
            raise RuntimeError(f"{type(error).__name__}: {one_line(error)}") from error
        row |= {"status": "out of memory", "reason": one_line(error).removeprefix("CUDA out of memory. ")}
    if row.get("status", "ok") != "ok":
        clean()  # only now: the error's traceback held every tensor


def hold(row: Row, verdict: Verdict) -> None:
    """Record a verdict; a row that is wrong is not timed."""
    row |= verdict.row()
    if not verdict.ok:
        raise Unmeasured("WRONG", row["reason"])


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:240]


_shared: dict[Hashable, Any] = {}


def shared(key: Hashable, make: Callable[[], Made]) -> Made:
    """What cases that follow one another have in common, made once; that of another key is freed before."""
    if key not in _shared:
        _shared.clear()
        clean()
        _shared[key] = make()
    return _shared[key]


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # so that no row meets memory fragmented by earlier ones


@cache
def _code() -> str:
    return digest({name: source_digest(PACKAGE / name) for name in MEASURED_CODE})


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cell(row: Mapping[str, Any], name: str) -> str:
    """A value of a row for a table: ``x_MiB`` is ``x_bytes``, ``spread`` half the distance from p20 to p80."""
    value = row.get(name)
    if name == "remark":
        return ": ".join(filter(None, (row["status"], row["reason"]))) if row["status"] != "ok" else row.get("note", "")
    if name == "spread" and row.get("p80_ms"):
        return f"±{(row['p80_ms'] - row['p20_ms']) / 2 / row['median_ms']:.0%}"
    if name == "budget" and value:
        return f"{row['error'] / value:.0%}"
    if name.endswith("_MiB"):
        value = row.get(name.replace("_MiB", "_bytes"))
        value = None if value is None else value / 2**20
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def only_quick_on_cpu(config: Any, what: str) -> None:
    if not config.on_gpu and not config.quick:
        raise OptionError("device", f"{what} are timed on a GPU; on a CPU use --quick, which shows that it runs")
