"""``linattn compare --task ...``: a language model around each mechanism, on text or a task of sequences."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from linattn.lab.cases import Case, Outcome, Work
from linattn.lab.compare.comparison import Comparison, start_compiling
from linattn.lab.compare.costs import step_costs
from linattn.lab.compare.findings import Metric
from linattn.lab.page.numbers import counted
from linattn.lab.screen import Screen
from linattn.lab.tasks.text import SequenceTask
from linattn.lab.tasks.text.task import once
from linattn.lab.train.text.config import SETTINGS, OnTask, TextConfig, host_of_recipe, part_of, settings_named
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.hosts import Host, count_parameters, create_host, with_parameters
from linattn.lab.train.text.loop import TextNetwork, train_text
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.compiling import compile_blocks
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError, check_option

VALIDATION_SHARE = 0.1  # of labelled training data, held out while learning rates are chosen
PERCENT = ("accuracy", "exact_match", "legal", "pearson", "share")
# Options of a single run -> the option of a comparison with several values.
OF_MANY = {"mechanism": "mechanisms", "hybrid": "mechanisms", "width": "widths"}


class Contender(NamedTuple):
    """A mechanism or pattern of mechanisms, with or without Canon layers, in a host of one width."""

    pattern: str
    canon: str | None
    width: int | None

    @property
    def series(self) -> str:
        """The name of the contender without its width."""
        return self.pattern if self.canon is None else f"{self.pattern}+{self.canon}"

    @property
    def name(self) -> str:
        return self.series if self.width is None else f"{self.series} {self.width}"


@dataclass(frozen=True, kw_only=True)
class CompareText(OnTask, Comparison):
    """Train mechanisms on text or a task of sequences; table, CSV, charts and report.html. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    name: ClassVar[str] = "compare text"
    of_cases: ClassVar[tuple[str, ...]] = (
        *Comparison.of_cases, *SETTINGS, "task", "set", "recipe", "tokens", "canon", "widths", "equal_parameters"
    )  # fmt: skip
    mechanisms: tuple[str, ...] = option(
        ("softmax", "elu", "gated", "mlstm", "zeros"),
        "Mechanisms, with commas; a model whose layers differ is written with slashes: gated*3/softmax.",
        group="Comparison",
    )
    canon: tuple[str, ...] = option(
        ("none",), "Canon layers, with commas: none, ABCD, AbCD; each mechanism is trained with each.",
        group="Comparison",
    )  # fmt: skip
    widths: tuple[int, ...] = option(
        (), "Channels of the model, with commas; each mechanism is trained in each.", least=1, group="Comparison",
        default_text="by --size",
    )  # fmt: skip
    equal_parameters: bool = option(
        False, "Widen or narrow feed-forward parts until all have the parameters of the first.", group="Comparison",
        rare=True,
    )  # fmt: skip
    weights: bool = option(True, "Keep the weights of every run.", affects=False, group="Comparison", rare=True)

    @classmethod
    def by_recipe(cls, task: SequenceTask, given: Mapping[str, Any], recipe: str) -> dict[str, Any]:
        rates: tuple[float, ...] = given.get("lr") or ()
        one = {key: value for key, value in given.items() if key != "lr"}
        found = super().by_recipe(task, one | ({"lr": rates[0]} if len(rates) == 1 else {}), recipe)
        width = None if "size" in given else host_of_recipe(recipe).get("width")
        return ({} if width is None else {"widths": (width,)}) | found | {"lr": rates or (found["lr"],)}

    def check(self) -> None:
        for mechanism in self.owners():
            check_option("mechanisms", mechanism, list_mechanisms())
        super().check()

    # Contenders and their hosts.

    @property
    def of_name(self) -> dict[str, Contender]:
        """The contenders by name: those with and without Canon side by side, width after width."""
        canons = [None if letters in ("", "none") else letters for letters in self.canon] or [None]
        found = [Contender(p, c, w) for w in self.widths or (None,) for p in self.mechanisms for c in canons]
        return {contender.name: contender for contender in found}

    def series(self, name: str) -> str:
        """The name of a contender without its width: a line of charts joins these."""
        return self.of_name[name].series

    def contenders(self) -> tuple[str, ...]:
        return tuple(self.of_name)

    def owners(self) -> set[str]:
        return {mechanism for name in self.of_name for mechanism in self.host_named(name).layers}

    def host_named(self, name: str) -> Host:
        """The host of a contender, before numbers of parameters are made equal."""
        pattern, canon, width = self.of_name[name]
        with options_of_many(name):
            host = part_of(self, Host, mechanism=pattern, canon=canon, width=width, option={})
            own = {key: value for key, value in self.option.items() if key.rpartition(".")[0] in ("", *host.layers)}
            return replace(host, option=own)

    @once
    def hosts(self) -> dict[str, Host]:
        """Hosts by name; if equal parameters are asked for, all of one width have as many as the first."""
        found = {name: self.host_named(name) for name in self.of_name}
        wanted: dict[int | None, int] = {}
        for name, host in found.items() if self.equal_parameters else ():
            if host.width in wanted:
                found[name] = with_parameters(host, self.made, wanted[host.width])
            else:
                wanted[host.width] = count_parameters(create_host(host, self.made, 0))
        return found

    def options(self, name: str) -> dict[str, Any]:
        host = self.hosts[name]
        shape = {key: getattr(host, key) for key in ("canon", "width", "mlp_width", "rotary", "option")}
        return {"layers": host.layers, **shape}

    def check_hosts(self) -> None:
        need("a comparison of language models", "accelerate", "transformers", "safetensors")
        task = self.made
        for name in self.of_name:
            host = self.host_named(name)
            with options_of_many(name):
                create_host(host, task, 0)
        if len(self.lr) > 1:
            _ = self.validation
        _ = self.hosts  # raises if numbers of parameters cannot be made equal

    # The task, and what chooses learning rates.

    @once
    def validation(self) -> tuple[SequenceTask, SequenceTask]:
        """The task to train on and the task to evaluate while settings are chosen; test data is in neither.

        A text has a separate part for this. Of labelled examples a share is held out. Drawn sequences are drawn again
        with another seed.
        """
        task: Any = self.made
        if hasattr(task, "hold_out"):
            kept = replace(task, hold_out=task.hold_out or VALIDATION_SHARE, evaluate="valid")
            return kept, kept
        if hasattr(task, "evaluate"):
            return task, replace(task, evaluate="valid")
        if hasattr(task, "data_seed"):
            return task, replace(task, data_seed=task.data_seed + 1)
        raise OptionError("lr", f"several of them are compared on held-out data, and {task.name} has none: name one")

    @property
    def sweep_is_final(self) -> bool:  # type: ignore[override]
        """Whether validation takes no examples from training: a text has others, and drawn sequences are unlimited."""
        return not hasattr(self.made, "hold_out")

    def common(self) -> dict[str, Any]:
        return super().common() | {"task": self.made.identity()}

    def usual_lr(self, name: str) -> float:
        return self.lr[0] if self.lr else TextConfig.lr

    def metric(self) -> Metric:
        task, percent = self.made, self.made.metric in PERCENT
        name = task.metric.replace("_", " ")
        return Metric(name, "%" if percent else "", 2 if percent else 4, task.higher_is_better, "token", "step")

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"compare-{self.task}"

    def prepare(self, screen: Screen) -> None:
        if self.at_a_time() > 1 and getattr(self.made, "cache", None) is not None:
            self.made.prepare(screen.say)  # processes then read it from the cache

    # Cases.

    def training(self, lr: float, seed: int) -> TextConfig:
        device = self.device or self.place().type
        return part_of(self, TextConfig, lr=lr, seed=seed, min_lr=min(self.min_lr, lr), device=device)

    def keeps_weights(self) -> bool:
        return self.weights

    def run_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        config, task, validation = self.training(case["lr"], case["seed"]), self.made, None
        if config.compile:
            start_compiling(case["mechanism"])
        if case["validation"]:
            task, _ = self.validation
        elif case["seed"] == 0 and self.sweep_is_final:  # whether or not several rates are tried: it is the same run
            with suppress(OptionError):
                _, validation = self.validation

        def on_step(done: int, step: int, loss: float, accuracy: float) -> None:
            step += done * config.round_steps
            work.tell(step / config.steps, f"step {step:,} of {config.steps:,}, loss {loss:.3f}")

        with settings_named(type(self)):
            found = train_text(
                create_host(self.hosts[case["mechanism"]], self.made, case["seed"]), task, config, work.folder,
                validation=validation, keep_weights=self.keeps_weights(), on_step=on_step,
                on_work=lambda words: work.tell(0.0, words),
            )  # fmt: skip
        result = {"score": found.score, "metrics": found.records[-1].metrics, "seconds": found.seconds}
        result |= {"graphs": found.graphs, "records": [{"round": r.step, **asdict(r)} for r in found.records]}
        if found.validation is not None:
            result |= {"validation": found.validation[task.metric], "validation_metrics": found.validation}
        return result

    def cost_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        config = self.training(self.usual_lr(""), 0)
        device, networks, counts = torch.device(config.device), {}, {}
        batch, rows = next(iter(Feed(self.made, config, device).train())).parts[0]
        for name in (part["mechanism"] for part in case["mechanisms"]):
            if config.compile:
                start_compiling(name)
            model = create_host(self.hosts[name], self.made, 0).to(device)
            mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
            state = state_bytes(model, mechanisms, longest_sequence(self.made).to(device), config.precision)
            own = sum(mechanism.num_parameters for mechanism in mechanisms)
            counts[name] = {"parameters": count_parameters(model), "mechanism_parameters": own, "state_bytes": state}
            networks[name] = TextNetwork(model, self.made)
            if config.compile:
                compile_blocks(networks[name])  # time and memory are to be those of training
        losses = {name: (network, partial(network, batch, rows)) for name, network in networks.items()}
        graphs = config.graphs is not False
        found = step_costs(losses, "token", batch.inputs.numel(), device, config.precision, work.tell, graphs)
        return {"rows": [{"mechanism": name, **counts[name], **cost} for name, cost in found.items()]}

    # What is shown.

    def describe(self) -> dict[str, Any]:
        model = create_host(self.hosts[self.contenders()[0]], self.made, 0).config
        width = ", ".join(map(str, self.widths)) or str(model.hidden_size)
        host = {"size": self.size, "width": width, "depth": model.num_hidden_layers}
        host |= {"heads": model.num_attention_heads, "tokens": self.made.length}
        about = (
            f"{self.made.name}, {self.size} model of depth {host['depth']} and width {width} at "
            f"{self.made.length:,} tokens, {counted(self.steps, 'step')} of {counted(self.batch_size, 'sequence')}: "
            f"{counted(len(self.contenders()), 'mechanism')} x {counted(self.seeds, 'seed')}"
        )
        return {"kind": "text", "data": self.made.identity() | {"kind": self.made.kind}, "host": host, "about": about}

    def rows(self, done: Sequence[tuple[str, Outcome]]) -> list[dict[str, Any]]:
        """Rows of runs and costs say what contender they are of."""
        found = []
        for row in super().rows(done):
            host, contender = dict(row.pop("options", {})), self.of_name[row["mechanism"]]
            more: dict[str, Any] = {
                "pattern": contender.pattern,
                "series": self.series(row["mechanism"]),
                "width": contender.width,
            }
            more |= {"options": host.pop("option", None), "host": host}
            found.append(row | {name: value for name, value in more.items() if value})
        return found


@contextmanager
def options_of_many(contender: str) -> Iterator[None]:
    """Turn an error in an option of one contender into one of the option for all contenders."""
    try:
        yield
    except OptionError as error:
        raise OptionError(OF_MANY.get(error.option, error.option), f"{contender}: {error.message}") from error


def longest_sequence(task: SequenceTask) -> Tensor:
    """A sequence ``(1, T)`` of the task's length, so that tasks of several lengths are always measured at the same."""
    first = None
    for batch in task.test_batches(1):
        first = batch.inputs[:1] if first is None else first
        if batch.inputs.shape[1] == task.length:
            return batch.inputs[:1]
    assert first is not None
    return first


@torch.no_grad()
def state_bytes(model: Any, mechanisms: list[Mechanism], sequence: Tensor, precision: str) -> int | None:
    """Bytes of the state after one ``sequence (1, T)``, over all layers; None if there is no state.

    For a causal model it is that of the cache, which includes the state of Canon layers; for an encoder, the size that
    its mechanisms declare, in fp32.
    """
    if any(mechanism.info.state == "none" for mechanism in mechanisms):
        return None
    if not model.config.causal:
        return sum(4 * mechanism.state_size(sequence.shape[1]) for mechanism in mechanisms)
    model.eval()
    with torch.autocast(sequence.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        cache = model.model(sequence, use_cache=True).past_key_values
    return sum(_bytes(layer.state) for layer in cache.layers)


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.itemsize
    return sum(map(_bytes, state)) if isinstance(state, tuple) else 0
