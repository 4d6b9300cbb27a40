"""``linattn lab synth``: the controlled tasks of Physics of Language Models 4.1 (arXiv:2512.17351).

Every mechanism is trained with every kind of positions and of Canon layers, as in a comparison: the same first weights,
data order and budget. The table has a row each, and what Canon layers add.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from linattn.lab.cases import Outcome, Work
from linattn.lab.compare.comparison import Phase
from linattn.lab.compare.text import CompareText, Contender
from linattn.lab.compare.text_costs import training_step
from linattn.lab.experiment import RIGHT
from linattn.lab.kept import Case
from linattn.lab.page.numbers import counted
from linattn.lab.screen import Screen
from linattn.lab.tasks.synthetic.brevo import Brevo, right_answer
from linattn.lab.tasks.synthetic.lano import Lano
from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.accelerator import matrix_products
from linattn.lab.train.text.config import host_of_recipe, recipe_settings
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.hosts import Host, create_host
from linattn.lab.train.text.loop import TextFolder, TextNetwork
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
PAD = 1  # before shorter prompts and after finished texts: masked or cut off, so any token except the end will do
REPEATS = 3  # timed steps of a plan
OPTIMIZER = 1.15  # factor of a step's time: the timed step has no optimiser


class Placed(NamedTuple):
    """A contender of a comparison, with a kind of positions."""

    contender: Contender
    position: str

    @property
    def series(self) -> str:
        return f"{self.contender.series} {self.position}"

    @property
    def name(self) -> str:
        return self.series if self.contender.width is None else f"{self.series} {self.contender.width}"


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
    samples: int = option(
        0, "Sentences (lano) or answers (brevo) that each trained model writes, to be checked.", least=0, affects=False,
        group="Comparison",
    )  # fmt: skip
    plan: bool | None = option(
        None, "Say how many runs and seconds it would be, and stop; or do not measure it at all.", affects=False,
        default_text="say it and begin",
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
        if not self.final and self.samples:
            raise OptionError("samples", "must be 0 with --no-final, which keeps no trained model to write them")
        if self.samples and self.task not in ("lano", "brevo"):
            raise OptionError("samples", f"are checked for lano and brevo, not for {self.task}")

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"lab-synth-{self.task}"

    # Contenders: each with kinds of positions, those of all or its own.

    @property
    def placed(self) -> dict[str, Placed]:
        """The contenders by name, width after width.

        Example:
            >>> list(Synth(task="mano", canon=("none",)).placed)
            ['softmax rotary', 'softmax none', 'gated none']
        """
        found = []
        for width in self.widths or (None,):
            for entry in self.mechanisms:
                pattern, _, own = entry.partition(":")
                for position in own.split("+") if own else self.positions:
                    check_option("positions", position, POSITIONS)
                    canons = [None if letters == "none" else letters for letters in self.canon]
                    found += [Placed(Contender(pattern, canon, width), position) for canon in canons]
        return {placed.name: placed for placed in found}

    @property
    def of_name(self) -> dict[str, Contender]:
        return {name: placed.contender for name, placed in self.placed.items()}

    def series(self, name: str) -> str:
        return self.placed[name].series

    def host_named(self, name: str) -> Host:
        return replace(super().host_named(name), rotary=POSITIONS[self.placed[name].position])

    def keeps_weights(self) -> bool:
        return self.weights and self.final

    # Phases: those of a comparison; without final runs the first alone; at the end what trained models write.

    def phases(self) -> Generator[Phase, list[Outcome], None]:
        if not self.final:
            yield "sweep", self.sweep_cases()
            return
        runs = yield from self._until_costs()
        if self.samples:
            yield (
                "written",
                [
                    {"kind": "written", "mechanism": o.case["mechanism"], "samples": self.samples, "of": dict(o.case)}
                    for o in runs
                    if not o.error and o.case["seed"] == 0
                ],
            )

    def _until_costs(self) -> Generator[Phase, list[Outcome], list[Outcome]]:
        phases: Any = super().phases()
        phase, runs = next(phases), list[Outcome]()
        while True:
            outcomes = yield phase
            runs = outcomes if phase[0] == "run" else runs
            try:
                phase = phases.send(outcomes)
            except StopIteration:
                return runs

    def title(self, case: Case) -> str:
        return f"{case['mechanism']} writes" if case["kind"] == "written" else super().title(case)

    def written_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """The percentage of right texts among those that a trained model writes."""
        one, run = self.in_this_process(), case["of"]
        model = create_host(one.hosts[run["mechanism"]], one.made, run["seed"])
        weights = TextFolder(self.weights_of(run, work)).load_weights()
        model.load_state_dict(weights, strict=not model.config.tie_word_embeddings)
        return {"written": share_right(model.to(self.place()).eval(), one.made, case["samples"])}

    # The command.

    def run(self, screen: Screen) -> int:
        self.check_hosts()
        if self.plan is not False:
            screen.say(self.plan_words())
        return RIGHT if self.plan else super().run(screen)

    def plan_words(self) -> str:
        """How many runs there are and how long they take, by a few timed steps of every model."""
        swept, names = self.sweep_cases(), self.contenders()
        runs = len(swept)
        if self.final:
            runs += len(names) * (self.seeds - (1 if swept and self.sweep_is_final else 0))
        config = self.training(self.usual_lr(names[0]), 0)
        part = next(iter(Feed(self.made, config, self.place()).train())).parts[0]
        seconds = 0.0
        for host in self.hosts.values():
            network = TextNetwork(create_host(host, self.made, 0).to(self.place()), self.made)
            step, times = training_step(network, part, config.precision), []
            with matrix_products(config.precision):
                for _ in range(REPEATS + 1):
                    begin = perf_counter()
                    step()
                    if self.place().type == "cuda":
                        torch.cuda.synchronize(self.place())
                    times.append(perf_counter() - begin)
            seconds += OPTIMIZER * config.steps * config.accumulation * median(times[1:]) * runs / len(names)
        jobs = self.at_a_time()
        words = f"{counted(runs, 'run')} x {seconds / max(runs, 1):,.1f} s of training = {seconds:,.0f} s"
        more = f", {jobs} at a time: {seconds / jobs:,.0f} s if they do not slow one another"
        return words + (more if jobs > 1 else "")

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
        """Rows with ``mechanism``, ``positions``, ``canon``, and ``scores`` by width: means over seeds of each metric.

        ``gain`` holds, by width, what Canon layers add to the first metric. Without final runs the scores are those of
        the best rate, and ``rates`` holds the score of each.
        """
        kind, first = "run" if self.final else "sweep", METRICS[self.task][0]
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for name, (contender, position) in self.placed.items():
            key = (contender.pattern, position, contender.canon or "none")
            row = found.setdefault(
                key, dict(zip(("mechanism", "positions", "canon"), key, strict=True)) | {"scores": {}}
            )
            runs = [r for r in rows if r["kind"] == kind and r["mechanism"] == name and not r.get("error")]
            measured = "metrics" if self.final else "validation_metrics"
            if not self.final:
                by_rate = {f"{r['lr']:g}": r["validation"] for r in runs}
                row.setdefault("rates", {})[str(contender.width)] = by_rate
                best = self.metric().best(by_rate) if by_rate else ""
                runs = [r for r in runs if f"{r['lr']:g}" == best]
            more = {key: value for r in rows if r["mechanism"] == name for key, value in r.items()
                    if key in ("written", "parameters")}  # fmt: skip
            scores: dict[str, Any] = {
                metric: fmean(r[measured][metric] for r in runs) if runs else None for metric in self.shown_metrics()
            }
            if scores.get("bits") is not None and more.get("parameters"):
                scores["bits_per_parameter"] = scores["bits"] / more["parameters"]
            row["scores"][str(contender.width)] = scores | {k: v for k, v in more.items() if k == "written"}
        for (pattern, position, canon), row in found.items():
            plain = found.get((pattern, position, "none"))
            row["gain"] = None
            if canon != "none" and plain is not None:
                pairs = {width: (scores[first], plain["scores"].get(width, {}).get(first))
                         for width, scores in row["scores"].items()}  # fmt: skip
                row["gain"] = {width: None if None in pair else pair[0] - pair[1] for width, pair in pairs.items()}
        return list(found.values())

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        """Widths below each other: side by side they would not fit a screen."""
        found = self.paper_table(rows)
        metrics = list(dict.fromkeys(name for row in found for scores in row["scores"].values() for name in scores))
        names = [
            "mechanism",
            "positions",
            "canon",
            "width",
            *(name.replace("_", " ") for name in metrics),
            "canon adds",
        ]
        return names, [
            [row["mechanism"], row["positions"], row["canon"], width, *(_number(scores.get(name)) for name in metrics),
             _number((row["gain"] or {}).get(width), "+")]
            for row in found for width, scores in row["scores"].items()
        ]  # fmt: skip


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else format(value, f"{sign}.1f" if abs(value) >= 10 else f"{sign}.3g")


@torch.no_grad()
def share_right(model: Any, task: SequenceTask, samples: int) -> float:
    """Percentage of right texts: sentences at temperature 1 from ``bos`` for Lano, greedy answers for Brevo."""
    if isinstance(task, Lano):
        prompts = torch.zeros(samples, 1, dtype=torch.int64)
        written = _written(model, prompts, torch.ones_like(prompts), task.length, stop=0, sample=True)
        return 100 * sum(task.valid(row) for row in written) / samples
    assert isinstance(task, Brevo)
    questions = task.questions(samples)
    size = max(map(len, questions))
    prompts = torch.tensor([[PAD] * (size - len(row)) + row for row in questions])
    mask = torch.tensor([[0] * (size - len(row)) + [1] * len(row) for row in questions])
    most = task.nodes * task.words.longest + 1
    written = _written(model, prompts, mask, most, stop=task.bos + 3, sample=False)
    pairs = zip(questions, written, strict=True)
    return 100 * sum(right_answer(asked, found, task.words, task.bos) for asked, found in pairs) / samples


def _written(model: Any, prompts: Tensor, mask: Tensor, most: int, *, stop: int, sample: bool) -> list[list[int]]:
    """What the model writes after each prompt, up to the token that stops it; empty if it does not stop."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(0)
        out = model.generate(
            prompts.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=most, do_sample=sample,
            eos_token_id=stop, pad_token_id=PAD,
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
        )  # fmt: skip
    rows = out[:, prompts.shape[1] :].tolist()
    return [row[: row.index(stop)] if stop in row else [] for row in rows]
