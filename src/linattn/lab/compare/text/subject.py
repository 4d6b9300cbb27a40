"""The subject of comparisons on sequences: a language model around each mechanism."""

from dataclasses import asdict, fields, replace
from functools import cached_property
from typing import Any

import torch

from linattn.lab.compare.cells import Cell, train_config
from linattn.lab.compare.subject import OnRecord, OnStep, Outcome, Subject, Trainer
from linattn.lab.compare.text.adopt import OWN_TEST, adopt
from linattn.lab.compare.text.costs import known_costs, measure_costs
from linattn.lab.compare.text.settings import TextCompareConfig, options_of_many
from linattn.lab.page.numbers import counted
from linattn.lab.pages.metric import Metric
from linattn.lab.tasks.text import SequenceTask, text_task
from linattn.lab.train.text.hosts import HostOptions, count_parameters, create_host, with_parameters
from linattn.lab.train.text.loop import task_settings, train_text
from linattn.support.machine import describe_run
from linattn.support.options import OptionError
from linattn.support.telling import OnWork

VALIDATION_SHARE = 0.1  # of labelled training data, held out while learning rates are chosen
PERCENT = ("accuracy", "exact_match", "legal", "pearson")


class Texts(Subject):
    """Comparison by the metric of a task."""

    def __init__(self, config: TextCompareConfig) -> None:
        self.config, self.rounds = config, config.train.rounds
        self.task = text_task(config.task, **config.settings)
        metric, percent = self.task.metric, self.task.metric in PERCENT
        name, decimals = metric.replace("_", " "), 2 if percent else 4
        self.metric = Metric("score", name, "%" if percent else "", decimals, self.task.higher_is_better)
        self.sweep_is_final = not holds_out(self.task)

    @cached_property
    def hosts(self) -> dict[str, HostOptions]:
        """Hosts by name; if equal parameters are asked for, all have as many as the first."""
        plain = {name: self.config.host_of(name) for name in self.config.mechanisms}
        if not self.config.equal_parameters:
            return plain
        found: dict[str, HostOptions] = {}
        wanted: dict[int | None, int] = {}  # by width: models of different widths need not be equal
        for name, host in plain.items():
            if host.width not in wanted:
                wanted[host.width] = count_parameters(create_host(host, self.task, 0))
                found[name] = host
            else:
                found[name] = with_parameters(host, self.task, wanted[host.width])
        return found

    def check(self) -> None:
        for name in self.config.mechanisms:
            host = self.config.host_of(name)
            with options_of_many(name):
                create_host(host, self.task, 0)
        _ = self.hosts  # raises if numbers of parameters cannot be made equal

    def describe(self) -> dict[str, Any]:
        config, task = self.config, self.task
        model = create_host(self.hosts[config.mechanisms[0]], task, 0).config
        widths = [width for width in config.widths if width is not None]
        per_head = config.host.head_dim
        heads = model.num_attention_heads if per_head is None else [width // per_head for width in widths]
        host = {
            "size": config.host.size,
            "tokens": task.length,
            "width": widths or model.hidden_size,
            "depth": model.num_hidden_layers,
            "heads": heads or model.num_attention_heads,
            "equal_parameters": config.equal_parameters,
            "attention_gate": config.host.attention_gate,
            "dropout": config.host.dropout,
            "options": {name or "all": dict(options) for name, options in config.host.options.items()},
        }
        train = {name: value for name, value in asdict(config.train).items() if name not in ("seed", "lr")}
        return {
            **describe_run(torch.device(config.train.device)),
            "kind": "text",
            "metric": asdict(self.metric),
            "data": task_settings(task) | {"kind": task.kind},
            "host": host,
            "train": train | {"betas": list(config.train.betas)},
            "seeds": list(range(config.seeds)),
            "lrs": sorted(set(config.lrs)) or [config.train.lr],
        }

    def announce(self, meta: dict[str, Any]) -> str:
        host, train = meta["host"], self.config.train
        width = ", ".join(map(str, host["width"])) if isinstance(host["width"], list) else host["width"]
        return (
            f"{self.task.name}, {host['size']} model of depth {host['depth']} and width {width} at "
            f"{host['tokens']:,} tokens, {counted(train.steps, 'step')} of {counted(train.batch_size, 'sequence')} on "
            f"{meta['device']}"
        )

    def trainer(self, on_step: OnStep, on_record: OnRecord) -> Trainer:
        return TextTrainer(self, on_step, on_record)

    def prepare(self, on_work: OnWork) -> None:
        """Draw data once; processes then read it from the cache, if there is one."""
        if self.config.jobs > 1 and getattr(self.task, "cache", None) is not None:
            self.task.prepare(on_work)

    def adopt(self, cell: Cell) -> bool:
        return adopt(self, cell)

    def known_costs(self, on_work: OnWork) -> dict[str, dict[str, Any]]:
        return known_costs(self.hosts, self.task, self.config.train, on_work)

    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        hosts = {name: self.hosts[name] for name in mechanisms}
        return measure_costs(hosts, self.task, self.config.train, on_work)

    def details(self, mechanism: str) -> dict[str, Any]:
        contender = self.config.contenders[mechanism]
        return {"pattern": contender.pattern, "canon": contender.canon, "width": contender.width,
                "series": contender.series}  # fmt: skip

    def step_words(self, epoch: int, step: int) -> str:
        return f"step {epoch * self.config.train.round_steps + step:,} of {self.config.train.steps:,}"


class TextTrainer(Trainer):
    """Trains runs on one task, so that all have the same data."""

    def __init__(self, texts: Texts, on_step: OnStep, on_record: OnRecord) -> None:
        super().__init__(texts.config)
        self.texts, self.on_step, self.on_record = texts, on_step, on_record
        self._held_out: tuple[SequenceTask, SequenceTask] | None = None

    def train(self, cell: Cell) -> Outcome:
        texts = self.texts
        config = train_config(texts.config, cell)
        task, test = (texts.task, None) if not cell.validation else self._validation()
        folder = cell.folder(texts.config.output)
        found = train_text(
            create_host(texts.hosts[cell.mechanism], texts.task, cell.seed),
            task,
            config,
            folder,
            test=test,
            own_test=folder / OWN_TEST if cell.validation and texts.sweep_is_final else None,
            keep_weights=texts.config.keep_weights,
            on_step=lambda epoch, step, loss, accuracy: self.on_step(cell, epoch, step, loss, accuracy),
            on_record=lambda record: self.on_record(cell, record.score, -(-record.step // config.round_steps)),
            on_work=self.on_work,
        )
        records = [asdict(record) for record in found.records]
        return Outcome(found.score, found.seconds, records, {"graphs": found.graphs})

    def _validation(self) -> tuple[SequenceTask, SequenceTask]:
        if self._held_out is None:
            self._held_out = validation(self.texts.task)
        return self._held_out


def validation(task: Any) -> tuple[SequenceTask, SequenceTask]:
    """The task to train on and the task to evaluate while settings are chosen; test data is in neither.

    A text has a separate part for this. Of labelled examples a share is held out. Drawn sequences are drawn again with
    another seed.
    """
    known = {field.name for field in fields(task)}
    if holds_out(task):
        kept = replace(task, hold_out=task.hold_out or VALIDATION_SHARE, evaluate="valid")
        return kept, kept
    if "evaluate" in known:
        return task, replace(task, evaluate="valid")
    if "data_seed" in known:
        return task, replace(task, data_seed=task.data_seed + 1)
    raise OptionError("lr", f"several of them are compared on held-out data, and {task.name} has none: name one")


def holds_out(task: Any) -> bool:
    """Whether validation takes examples from training; a text has others, and drawn sequences are unlimited."""
    return "hold_out" in {field.name for field in fields(task)}
