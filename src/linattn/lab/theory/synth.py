"""``linattn lab synth``: the controlled tasks of Physics of Language Models 4.1 (arXiv:2512.17351).

Every mechanism is trained with every kind of positions and of Canon layers, as in a comparison: the same first weights,
data order and budget. The table has a row each, and what Canon layers add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch

from linattn.lab.cases import Outcome
from linattn.lab.compare.comparison import Point
from linattn.lab.compare.text import CompareText, Contender
from linattn.lab.screen import Screen
from linattn.lab.train.text.config import host_of_recipe, recipe_settings
from linattn.lab.train.text.hosts import Host
from linattn.support.config import option
from linattn.support.files import write_json
from linattn.support.options import OptionError, check_option

# Kind of positions -> share of a head's channels that rotary positions rotate.
POSITIONS = {"rotary": 1.0, "quarter": 0.25, "none": 0.0}
# Small models in short runs take higher learning rates than the paper's, and a longer share of the run to warm up. In
# all else they are trained alike, whatever the task's recipe says.
SMALL = {"betas": (0.9, 0.98), "weight_decay": 0.03, "eps": 1e-8, "schedule": "cosine"}
WARMUP = 0.05
PAPER = {"depo": "depo1-225", "brevo": "brevo1-70", "capo": "capo-50k", "mano": "mano-10", "lano": "lano-f"}
# Metrics of the table; models are compared by the first.
METRICS = {"depo": ("accuracy",), "brevo": ("exact_match", "legal"), "capo": ("bits", "share"), "mano": ("accuracy",),
           "lano": ("kl", "legal")}  # fmt: skip
# Options at the small scales, and of tasks: settings, then steps and batch size.
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"size": "small", "depth": 2, "heads": 2, "widths": (64,), "lr": (3e-3,)},
    "gpu": {"size": "small", "depth": 4, "heads": 2, "widths": (64, 128), "lr": (1e-3, 2e-3, 4e-3)},
}
BUDGETS: dict[str, dict[str, tuple[dict[str, Any], int, int]]] = {
    "cpu": {
        "depo": ({"letters": 12, "word_length": (1, 1), "nodes": 5, "hops": 2, "length": 64, "test_examples": 64},
                 300, 16),
        "brevo": ({"nodes": 4, "length": 64, "test_examples": 64}, 300, 16),
        "capo": ({"people": 100, "length": 94, "test_examples": 50}, 200, 16),
        "mano": ({"operations": 1, "modulus": 5, "length": 64, "test_examples": 64}, 300, 16),
        "lano": ({"root": 12, "length": 64, "test_examples": 64}, 300, 16),
    },
    # Small enough that a host of width 64 learns them in about a thousand steps, large enough that not every host does.
    "gpu": {
        "depo": ({"letters": 16, "word_length": (1, 1), "nodes": 8, "hops": 4, "length": 128, "test_examples": 512},
                 1200, 64),
        "brevo": ({"nodes": 7, "length": 128, "test_examples": 512}, 1200, 64),
        "capo": ({"people": 10_000, "length": 256, "test_examples": 512}, 3000, 64),
        "mano": ({"operations": 3, "modulus": 5, "length": 128, "test_examples": 512}, 1200, 64),
        "lano": ({"root": 19, "length": 256, "test_examples": 128}, 3000, 128),
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Synth(CompareText):
    """Controlled tasks of Physics of Language Models 4.1: what a mechanism, positions and Canon layers are good for.

    depo: hops along a cycle; brevo: sorting a graph; capo: facts about people; mano: arithmetic; lano: a grammar.
    Trains every mechanism with every kind of positions and Canon layers as `linattn compare` does, and writes
    table.json, results.json and report.html. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    name: ClassVar[str] = "lab synth"
    of_cases: ClassVar[tuple[str, ...]] = (*CompareText.of_cases, "scale", "positions", "rotary")
    task: str = option(help="depo, brevo, capo, mano or lano.", argument=True, choices=METRICS)
    scale: str = option(
        "cpu", "Size of task, model and training: cpu or gpu, which take minutes, or paper.",
        choices=(*SCALES, "paper"), group="Comparison", default_text="by device",
    )  # fmt: skip
    mechanisms: tuple[str, ...] = option(
        ("softmax", "gated:none"),
        "Mechanisms, with commas; gated:none has positions of its own, softmax:rotary+none both.", group="Comparison",
    )  # fmt: skip
    canon: tuple[str, ...] = option(("none", "ABCD"), "Canon layers, with commas.", group="Comparison")
    positions: tuple[str, ...] = option(
        ("rotary", "none"), "Positions, with commas: rotary, quarter (of a head's channels), none.", choices=POSITIONS,
        group="Comparison",
    )  # fmt: skip
    rotary: float | None = option(None, "Chosen by positions.", hidden=True)
    data: str | None = option(None, "These tasks are drawn.", hidden=True)
    seeds: int = option(1, "Runs of each.", least=1, group="Comparison")
    final: bool = option(
        True, "Final runs, scored on test data; without them the table has the scores that chose learning rates.",
        affects=False, group="Comparison",
    )  # fmt: skip

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> "Synth":
        """The options given, those of the scale, and those of the recipe for the others."""
        given = cls.typed(texts)
        task = given.get("task", "")
        check_option("task", task, METRICS)
        device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        scale = given.get("scale") or ("gpu" if device.startswith("cuda") else "cpu")
        check_option("scale", scale, (*SCALES, "paper"))
        # Runs are short: compiling would take longer than it saves.
        usual: dict[str, Any] = {"scale": scale, "compile": False}
        settings: dict[str, Any] = {}
        if scale == "paper":
            published = {key: value for key, value in host_of_recipe(PAPER[task]).items() if key != "width"}
            usual |= {"size": "base", "widths": (512, 768), "recipe": PAPER[task], **published}
            if given.get("heads"):
                usual.pop("head_dim", None)
        else:
            settings, steps, batch_size = BUDGETS[scale][task]
            steps = given.get("steps", steps)
            usual |= {**SCALES[scale], **SMALL, "steps": steps, "batch_size": batch_size}
            usual["warmup_steps"] = round(WARMUP * steps)
        recipe = given.get("recipe") or usual.get("recipe", "")
        # Without a recipe the settings are those of the task itself.
        settings = recipe_settings(recipe, task) | settings | given.get("set", {})
        return super().parse(usual | given | {"recipe": recipe, "set": settings})

    def check(self) -> None:
        super().check()
        if not self.final and len(set(self.lr)) < 2:
            raise OptionError("final", "--no-final shows the runs that choose learning rates: name several with --lr")

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"lab-synth-{self.task}"

    # Contenders: each with kinds of positions, those of all or its own.

    @property
    def placed(self) -> dict[str, tuple[Contender, str]]:
        """The contenders and their positions by name, width after width.

        Example:
            >>> list(Synth(task="mano", canon=("none",)).placed)
            ['softmax rotary', 'softmax none', 'gated none']
        """
        found = {}
        for width in self.widths or (None,):
            for entry in self.mechanisms:
                pattern, _, own = entry.partition(":")
                for position in own.split("+") if own else self.positions:
                    check_option("positions", position, POSITIONS)
                    for letters in self.canon:
                        contender = Contender(pattern, None if letters == "none" else letters, width)
                        name = f"{contender.series} {position}" + (f" {width}" if width else "")
                        found[name] = contender, position
        return found

    @property
    def of_name(self) -> dict[str, Contender]:
        return {name: contender for name, (contender, _) in self.placed.items()}

    def series(self, name: str) -> str:
        contender, position = self.placed[name]
        return f"{contender.series} {position}"

    def host_named(self, name: str) -> Host:
        return replace(super().host_named(name), rotary=POSITIONS[self.placed[name][1]])

    def keeps_weights(self) -> bool:
        return self.weights and self.final

    def final_cases(self, chosen: Mapping[str, Point]) -> list[dict[str, Any]]:
        return super().final_cases(chosen) if self.final else []

    def finish(self, screen: Screen, meta: dict[str, Any], done: Sequence[tuple[str, Outcome]]) -> int:
        rows = self.paper_table(self.rows(done))
        scored_on = "test data" if self.final else "held-out data, by which the learning rate was chosen"
        write_json(self.folder / "table.json", {"meta": meta | {"scored_on": scored_on}, "rows": rows})
        code = super().finish(screen, meta, done)
        screen.say(f"Scored on {scored_on}. Table: {self.folder / 'table.json'}")
        return code

    def shown_metrics(self) -> tuple[str, ...]:
        """The metrics of the table; for Depo also the accuracies at K and K/2 hops, as in the paper's.

        Example:
            >>> Synth(task="depo", set={"hops": 8}).shown_metrics()
            ('accuracy', 'accuracy_8', 'accuracy_4')
        """
        hops = getattr(self.made, "tested_hops", ())
        return (*METRICS[self.task], *(f"accuracy_{k}" for k in hops[-1:-3:-1]))

    def paper_table(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A row for each contender: means over seeds of each metric, and ``gain``, what Canon layers add to the first.

        Without final runs they are those of the best rate, and ``rates`` holds the score of each.
        """
        kind, measured = ("run", "metrics") if self.final else ("sweep", "validation_metrics")
        found: dict[tuple[Contender, str], dict[str, Any]] = {}
        for name, (contender, position) in self.placed.items():
            row: dict[str, Any] = {"mechanism": contender.pattern, "positions": position,
                                   "canon": contender.canon or "none", "width": contender.width}  # fmt: skip
            own = [r for r in rows if r["mechanism"] == name]
            runs = [r for r in own if r["kind"] == kind and not r.get("error")]
            if not self.final:
                rates = row["rates"] = {f"{r['lr']:g}": r["validation"] for r in runs}
                runs = [r for r in runs if f"{r['lr']:g}" == self.metric().best(rates)]
            for metric in self.shown_metrics() if runs else ():
                row[metric] = fmean(r[measured][metric] for r in runs)
            parameters = [r["parameters"] for r in own if "parameters" in r]
            if "bits" in row and parameters:
                row["bits_per_parameter"] = row["bits"] / parameters[-1]
            found[contender, position] = row
        first = METRICS[self.task][0]
        for (contender, position), row in found.items():
            plain = found.get((contender._replace(canon=None), position), {})
            if contender.canon and first in row and first in plain:
                row["gain"] = row[first] - plain[first]
        return list(found.values())

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        found = [{key: value for key, value in row.items() if key != "rates"} for row in self.paper_table(rows)]
        names = sorted(dict.fromkeys(name for row in found for name in row), key=lambda name: name == "gain")
        titles = [name.replace("_", " ") if name != "gain" else "canon adds" for name in names]
        return titles, [[_number(row.get(name)) for name in names] for row in found]


def _number(value: object) -> object:
    return format(value, ".1f" if abs(value) >= 10 else ".3g") if isinstance(value, float) else value
