"""An experiment: a config with the cases it stands for, how one is measured, and what its page shows."""

import csv
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from linattn.lab.cases import Case, Outcome, Where, Work, run_cases
from linattn.lab.screen import Screen
from linattn.support.config import Config, as_json, option
from linattn.support.files import write_atomically
from linattn.support.machine import cores, describe_run
from linattn.support.options import check_device, check_folder

if TYPE_CHECKING:
    from pandas import DataFrame

    from linattn.lab.page import Section

RIGHT, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Machine(Config):
    """Where something runs, and where its files go."""

    device: str = option("", "cpu, cuda or cuda:N.", group="Machine", default_text="cuda where there is one")
    jobs: int = option(
        0, "Cases at a time.", group="Machine", least=0, affects=False, default_text="one a core on a CPU, else 1"
    )
    where: Where = option("processes", "here, processes, or ray: a cluster.", group="Machine", affects=False, rare=True)
    output: Path | None = option(
        None, "Folder of the results.", group="Machine", affects=False, default_text="runs/<name>"
    )

    def place(self) -> torch.device:
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(name)
        return torch.device(name)

    def at_a_time(self) -> int:
        return self.jobs or (1 if self.place().type == "cuda" else min(cores(), 4))


@dataclass(frozen=True, kw_only=True)
class Experiment(Machine):
    """The base of experiments; one is a file with the fields of its config, and these methods."""

    name: ClassVar[str] = ""
    """The name of its folder below ``runs`` and of its file in ``results``."""

    def cases(self) -> list[dict[str, Any]]:
        """What is to be measured, each with all that its result depends on."""
        raise NotImplementedError

    @staticmethod
    def measure(case: Case, work: Work) -> Mapping[str, Any]:
        """The result of a case as values of JSON. Needs torch, numpy and matplotlib at most."""
        raise NotImplementedError

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> "list[Section]":
        """The sections of the page, from one row a case."""
        raise NotImplementedError

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        """The columns and rows that are printed at the end; by default all values that are no lists."""
        names = list(dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, list | dict)))
        return names, [[f"{v:.4g}" if isinstance(v := row.get(name), float) else v for name in names] for row in rows]

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What the rows show, printed and at the head of the page."""
        return []

    def wrong(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What contradicts a formula or a bound that the experiment is about; then the exit code is 1."""
        return []

    def title(self, case: Case) -> str:
        """A case in a few words, for progress."""
        return ", ".join(str(value) for value in case.values() if not isinstance(value, list | dict))

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / self.name

    def outcomes(self, screen: Screen, cases: Sequence[Case], **rules: Any) -> list[Outcome]:
        """Measure the cases that are not yet in the folder; ``rules`` are those of ``run_cases``."""
        here = self.where == "processes" and self.at_a_time() == 1
        usual = {"where": "here" if here else self.where, "jobs": self.at_a_time()}
        return run_cases(cases, self.measure, self.folder / "cases", title=self.title, screen=screen, **usual | rules)

    def run(self, screen: Screen) -> int:
        """The command: measure, save, print a table, write the page. Run again, it goes on where it stopped."""
        check_folder("output", self.folder)
        outcomes = self.outcomes(screen, self.cases())
        meta = describe_run(self.place()) | {"experiment": self.name, "config": self.values(affecting=True)}
        rows = [row for outcome in outcomes for row in outcome.rows()]
        right = [row for row in rows if not row.get("error")]
        self.show(screen, meta, rows, right, self.sentences(right))
        wrong = self.wrong(right)
        for sentence in wrong:
            screen.warn(sentence)
        return FAILED if wrong or len(right) < len(rows) else RIGHT

    def show(
        self,
        screen: Screen,
        meta: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        right: Sequence[Mapping[str, Any]],
        sentences: Sequence[str],
    ) -> None:
        """Save the rows, print a table of the right ones and the sentences, and write the page."""
        save_results(self.folder / "results.json", meta, rows)
        screen.table(self.name, *self.table(right))
        for sentence in sentences:
            screen.say(sentence)
        screen.result({"meta": meta, "rows": rows})
        page = self.write_page(meta, right)
        screen.say(f"page: {page}" if page else f"results: {self.folder / 'results.json'}")

    def write_page(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path | None:
        """The page of results, where what draws it is installed."""
        if not all(map(find_spec, ("pandas", "jinja2", "matplotlib"))):
            return None
        from linattn.lab.page import write_page

        return write_page(self.folder / "report.html", *self.page(meta, rows))

    def page(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """What ``write_page`` shows: the title, sections, ``meta``, and what leads to them."""
        from pandas import DataFrame

        title = (inspect.getdoc(type(self)) or self.name).split("\n", 1)[0].rstrip(".")
        return title, self.figures(DataFrame(rows), meta), meta, "", " ".join(self.sentences(rows))


def save_results(path: Path, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Results as JSON with one line a row, and the rows as CSV beside it: what a row lacks stays empty."""
    rows = [as_json(row) for row in rows]
    lines = ",\n".join(map(json.dumps, rows))
    text = f'{{"meta": {json.dumps(as_json(meta))},\n"rows": [\n{lines}\n]}}\n'
    write_atomically(path, lambda temporary: temporary.write_text(text))

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            for row in rows:
                writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})

    write_atomically(path.with_suffix(".csv"), write)


def load_results(path: Path) -> dict[str, Any]:
    """``{"meta": ..., "rows": [...]}`` as :func:`save_results` wrote it."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
