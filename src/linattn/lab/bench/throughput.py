"""`linattn throughput`: training tokens a second by sequence length, beside softmax with PyTorch's flash kernel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from linattn.lab.bench.benchmark import SOFTMAX, note, setting
from linattn.lab.bench.charts import by_length
from linattn.lab.bench.fit import crossovers, times_by
from linattn.lab.bench.language import LanguageBenchmark, TextModel, create_model, draw_text
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.running import Row, clean
from linattn.lab.bench.steps import COMPILED, StepTruth, compile_host, flash_only, forms
from linattn.lab.bench.timing import Timing, first_call, seconds_of
from linattn.lab.cases import Case, Work
from linattn.lab.page.plots import Chart, styles
from linattn.support.config import option
from linattn.support.options import OptionError

FIRST_SECONDS = 240.0  # limit of a first step
WARM_STEPS, LEARNING_RATE, CHECKED_LAYERS = 2, 1e-5, 2


@dataclass(frozen=True, kw_only=True)
class Throughput(LanguageBenchmark):
    """Training tokens per second against the length of sequences, for a language model of 135 million parameters.

    A step is forward, loss, backward and AdamW, compiled, with as many tokens at every length. The same model with
    softmax on PyTorch's flash kernel stands beside the mechanisms. Before a row is timed, the loss and gradients of two
    of its layers are checked against plain PyTorch.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (what is done is kept).
    """

    lengths: tuple[int, ...] = option(
        (), "Lengths of the sequences, with commas.", least=1, affects=False,
        default_text="2048,8192,32768, with --quick 16,32,64",
    )  # fmt: skip
    tokens: int = option(
        0, "Tokens of a step, a multiple of every length.", least=0, default_text="as many as the longest sequence has"
    )  # fmt: skip
    steps: int = option(6, "Steps that are timed for a row.", least=1)
    backend: Literal["", "inductor", "aot_eager", "eager"] = option(
        "", "Backend of torch.compile.", default_text="inductor, on a CPU eager"
    )  # fmt: skip

    name: ClassVar[str] = "throughput"
    keys: ClassVar[tuple[str, ...]] = ("mechanism", "length")
    columns: ClassVar[tuple[str, ...]] = (
        "length", "mechanism", "median_ms", "spread", "tokens_per_second", "of_softmax", "peak_MiB", "budget"
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        for length in self.lengths:
            if self.tokens and self.tokens % length:
                raise OptionError("tokens", f"must be a multiple of every length, got {self.tokens} for {length}")

    def filled(self) -> Self:
        lengths = self.lengths or ((16, 32, 64) if self.quick else (2048, 8192, 32768))
        return replace(
            super().filled(), lengths=lengths, tokens=self.tokens or max(lengths),
            backend=self.backend or ("inductor" if self.on_gpu else "eager"),
        )  # fmt: skip

    @property
    def autocast(self) -> bool:
        return self.dtype != "float32"

    def cases(self) -> list[dict[str, Any]]:
        lengths = sorted(set(self.filled().lengths))
        return [self.case(mechanism=name, length=T) for name in self.subjects for T in lengths]

    def warm(self, case: Case) -> None:
        """Compile one block of the model."""
        model = create_model(self.size, case["mechanism"], self.place(), self.seed, depth=1)
        compile_host(model, COMPILED, self.backend)
        with flash_only(case["mechanism"], self.place()):
            training_step(model, *draw_batch(self, case["length"]), self.autocast)()

    def fill(self, case: Case, work: Work, row: Row) -> None:
        mechanism = case["mechanism"]
        device, length = self.place(), case["length"]
        torch.compiler.reset()
        clean()
        model = create_model(self.size, mechanism, device, self.seed)
        inputs, targets = draw_batch(self, length)
        row |= {"batch": len(inputs), "parameters": sum(p.numel() for p in model.parameters())}
        work.tell(0.0, "looking at attention")
        row["explain"] = forms(model, mechanism, inputs[:1], targets[:1], self.autocast)["explain"]
        with flash_only(mechanism if self.autocast else "", device):
            work.tell(0.1, "checking")
            truth = StepTruth(
                lambda impl: create_model(self.size, mechanism, device, self.seed, impl=impl),
                mechanism, inputs, targets, self.autocast, blocks=CHECKED_LAYERS, piece=1,
                words=f"plain PyTorch, {CHECKED_LAYERS} layers",
            )  # fmt: skip
            compile_host(model, COMPILED, self.backend)
            if not note(row, truth.check(model, model)):
                return
            del truth
            clean()
            work.tell(0.4, "compiling")
            step = training_step(model, inputs, targets, self.autocast)
            row["first_seconds"] = first_call(step, device, FIRST_SECONDS)  # now the optimiser's memory is allocated
            work.tell(0.7, "timing")
            losses: list[Tensor] = []
            row["peak_bytes"] = peak_bytes(step, device)
            samples = [seconds_of(lambda: losses.append(step()), device) for _ in range(WARM_STEPS + self.steps)]
        if not torch.stack(losses).isfinite().all():
            row |= {"status": "WRONG", "reason": "the loss is not finite after some steps"}
            return
        timing = Timing.of(samples[WARM_STEPS:])
        row |= timing.row() | {"tokens_per_second": inputs.numel() / timing.median}

    def derived(self, rows: list[Row]) -> list[Row]:
        times = times_by(rows, "length", mechanism=SOFTMAX)
        for row in rows:
            if row.get("median_ms") and row["length"] in times:
                row["of_softmax"] = row["median_ms"] / times[row["length"]]
        return rows

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return self.overtaken(overtakes(rows), rows)

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        looks = styles(list(dict.fromkeys(row["mechanism"] for row in rows)))
        marks = [own["length"] for own in overtakes(rows) if own["length"]]
        values = (
            ("tokens_per_second", "speed", "thousand tokens a second", 1000),
            ("peak_bytes", "a step, beyond weights and optimiser", "peak GiB", 2**30),
        )
        panels = [by_length(rows, "mechanism", "length", *own, looks, log=False, marks=marks) for own in values]
        shape = f"training, {meta['settings']['tokens']:,} tokens a step, {meta['settings']['dtype']}"
        return [Chart("throughput", setting(meta, shape), "Dotted: faster than softmax from there on.", panels, looks)]


def overtakes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return crossovers(rows, "length", SOFTMAX, "training")


def training_step(model: TextModel, inputs: Tensor, targets: Tensor, autocast: bool) -> Callable[[], Tensor]:
    """Forward, loss, backward and AdamW; returns the loss."""
    on_gpu = inputs.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=on_gpu)

    def step() -> Tensor:
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def draw_batch(config: Throughput, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens after them, ``(tokens / T, T)``; all lengths are cut from the same text."""
    text = draw_text(config.size, (config.tokens + 1,), config.place(), config.seed)
    return text[:-1].view(-1, length), text[1:].view(-1, length)
