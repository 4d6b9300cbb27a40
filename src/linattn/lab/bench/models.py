"""`linattn models`: training steps of whole models beside the same models on softmax."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, note, only_quick_on_cpu, setting
from linattn.lab.bench.charts import lines
from linattn.lab.bench.hosts import SMALLEST, VARIANTS, Host, ModelCase, create_image_host, draw_images, select, variant
from linattn.lab.bench.language import FULL, TINY, create_model, draw_text
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.running import Absent, Row, shared
from linattn.lab.bench.steps import (
    COMPILED,
    EAGER_GRAPH,
    GRAPH,
    MODES,
    REDUCED,
    Loss,
    Step,
    StepTruth,
    compile_host,
    flash_only,
    forms,
    make_step,
    time_step,
)
from linattn.lab.bench.timing import first_call
from linattn.lab.cases import Case, Work
from linattn.lab.page.plots import Chart, styles
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.config import option

FIRST_SECONDS = 240.0  # limit of a first step
VISION_PIECE, FIRST_BLOCKS, MOST_LINES = 64, 2, 14


@dataclass(frozen=True, kw_only=True)
class Models(Benchmark):
    """Training steps of whole models beside the same models on softmax.

    DeiT-small at 224 and 512 pixels, and a language model of 135 million parameters at 8192 tokens; by name the
    backbones of papers, with a chart of time and memory over softmax against the size of images. Each row's loss and
    gradients are checked against plain PyTorch in the same run, of a backbone in a model with one block a stage, of a
    language model in its first two blocks; every call of attention says what it takes.

    Exit code: 0 all right, 1 a row was WRONG, failed or not on kernels, 2 a bad option, 130 interrupted (what is done
    is kept).
    """

    only: tuple[str, ...] = option(
        (), "Cases, with commas: vit-224, vit-512, language-8192-b1, language-8192-b4 (the default: these four); "
        "backbones, the smallest of every family at 224, 384, 512 and 1024 pixels, backbones-224 at one of these; "
        "presets and presets-224, all models of all families; any model of timm's linattn_* by name and size, such as "
        "nalaformer_small-512.", affects=False,
    )  # fmt: skip
    mechanisms: tuple[str, ...] = option(
        (), "Mechanisms, with commas; softmax is measured in any case.", affects=False,
        choices=lambda: [*list_mechanisms(), *VARIANTS], default_text="those of each case",
    )  # fmt: skip
    modes: tuple[str, ...] = option(
        (COMPILED, GRAPH), "How a step runs, with commas: compiled, cuda-graph (of the compiled step), reduce-overhead "
        "(PyTorch's own), eager-graph (a CUDA graph of the step without torch.compile: the shortest to prepare, for "
        "many models).", choices=MODES, affects=False,
    )  # fmt: skip
    backend: Literal["", "inductor", "aot_eager", "eager"] = option(
        "", "Backend of torch.compile.", default_text="inductor, on a CPU eager"
    )  # fmt: skip
    milliseconds: float = option(500.0, "Milliseconds of measured steps for a row.", above=0)
    quick: bool = option(False, "Tiny models: shows that everything runs, times nothing.")

    name: ClassVar[str] = "models"
    keys: ClassVar[tuple[str, ...]] = ("case", "mechanism", "mode")
    columns: ClassVar[tuple[str, ...]] = (
        "case", "mechanism", "mode", "median_ms", "over_softmax", "per_second", "peak_MiB", "budget"
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        select(self.only)
        only_quick_on_cpu(self, "models")

    def filled(self) -> Self:
        return replace(super().filled(), backend=self.backend or ("inductor" if self.on_gpu else "eager"))

    @property
    def autocast(self) -> bool:
        """Whether to run bf16 around fp32 weights, as models are trained on a GPU."""
        return self.on_gpu

    @property
    def file_name(self) -> str:
        return "backbones" if self.only else self.name

    def cases(self) -> list[dict[str, Any]]:
        """Model by model, softmax first; each mechanism in every mode."""
        found = []
        for model in select(self.only):
            causal = model.kind == "language"
            able = list_mechanisms(causal=True) if causal else list_mechanisms(bidirectional=True)
            asked = [name for name in self.mechanisms if variant(name)[0] in able] or model.mechanisms
            for name in dict.fromkeys((SOFTMAX, *asked)):
                found += [self.case(case=model.name, mechanism=name, mode=mode) for mode in self.modes]
        return found

    def warm(self, case: Case) -> None:
        """Run one block of the model, whose graphs all of its blocks share."""
        if case["mode"] != REDUCED:
            subject = _Subject(self, case)
            host, loss_of = subject.compiled(case["mode"], depth=subject.model.checked_depth or 1)
            make_step(host, loss_of, *subject.batch, self.autocast)()

    def fill(self, case: Case, work: Work, row: Row) -> None:
        mode, mechanism = case["mode"], case["mechanism"]
        subject = shared(("models", case["case"], mechanism, str(case["settings"])), lambda: _Subject(self, case))
        model, device = subject.model, subject.device
        row |= {"shape": model.shape, "unit": model.unit}
        if mode != COMPILED and device.type != "cuda":
            raise Absent("CUDA graphs need a GPU")
        # In a backbone PyTorch takes the fastest that serves: windows with a bias of positions have no flash kernel.
        with nullcontext() if model.kind == "backbone" else flash_only(mechanism, device):
            checked = model.checked_depth
            if not subject.forms:
                work.tell(0.0, "looking at attention")
                subject.forms = forms(subject.create(depth=checked), mechanism, *subject.batch, self.autocast)
            row |= subject.forms
            work.tell(0.1, "first step" if mode == EAGER_GRAPH else "compiling")
            host, loss_of, step, row["first_seconds"] = subject.started(mode)
            row["parameters"] = sum(p.numel() for p in host.parameters())
            work.tell(0.4, "checking")
            if subject.truth is None:
                piece = {"vision": VISION_PIECE, "language": 1}.get(model.kind, model.batch)
                blocks = FIRST_BLOCKS if model.kind == "language" else None
                part = f", its first {blocks} blocks" if blocks else f", {checked} block(s) a stage" if checked else ""
                subject.truth = StepTruth(
                    lambda impl: subject.create(impl, checked), mechanism, *subject.batch, self.autocast, blocks=blocks,
                    piece=piece, words=model.shape + part,
                )  # fmt: skip
            right = note(row, subject.truth.check(*(subject.compiled(mode, checked) if checked else (host, loss_of))))
            work.tell(0.7, "timing")
            row["peak_bytes"] = peak_bytes(step, device)
            timing = time_step(step, mode, device, self.milliseconds)
            row |= timing.row() | {"per_second": model.units / timing.median}
        if right and row["on_kernels"] is False and device.type == "cuda":
            others = [text for text in row["explain"] if not text.startswith("triton")]
            row |= {"status": "not on kernels", "reason": "; ".join(others) or "no call of attention was heard"}

    def derived(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            found = {r["mechanism"]: r for r in rows if (r["case"], r["mode"]) == (row["case"], row["mode"])}
            for name, value in (("over_softmax", "median_ms"), ("memory_over_softmax", "peak_bytes")):
                other = found.get(SOFTMAX, {}).get(value)
                row[name] = row[value] / other if row.get(value) and other else None
        return rows

    def described(self, outcomes: Sequence[Any], rows: Sequence[Row]) -> dict[str, Any]:
        return {"precision": "bf16 autocast, fp32 weights" if self.autocast else "fp32"}

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        shares = [goal["reached"] for goal in goals(rows) if goal["reached"] is not None]
        said = [f"{sum(shares)} of {len(shares)} beat the same model on softmax."] if shares else []
        texts = (f"{row['mechanism']}: {'; '.join(row['explain'])}" for row in rows if row.get("explain"))
        return [*said, *dict.fromkeys(texts)]

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        """Time and memory over softmax by size of images, of models that were measured beside softmax."""
        chosen = [r for r in rows if r.get("unit") == "images" and r["mechanism"] != SOFTMAX and r["status"] == "ok"]
        mode = next((row["mode"] for row in chosen if row["over_softmax"]), None)
        points: dict[str, dict[str, dict[int, float]]] = {}
        for row in (row for row in chosen if row["mode"] == mode):
            model, _, pixels = row["case"].rpartition("-")
            for value in ("over_softmax", "memory_over_softmax"):
                own = points.setdefault(f"{model}, {row['mechanism']}", {}).setdefault(value, {})
                own |= {int(pixels): row[value]} if row[value] else {}
        few = {name: own for name, own in points.items() if name.partition(",")[0] in SMALLEST}
        shown = few if len(points) > MOST_LINES and few else points
        looks = styles(list(shown))
        panels = [
            lines(f"{what} over softmax", "share", {name: own.get(value, {}) for name, own in shown.items()}, looks,
                  xlabel="pixels", level=1.0)
            for what, value in (("time", "over_softmax"), ("memory", "memory_over_softmax"))
        ]  # fmt: skip
        title = setting(meta, f"forward and backward, {mode}", str(meta["precision"]))
        return (
            [Chart("models", title, "Below 1: better than the same model on softmax.", panels, looks)] if shown else []
        )


def goals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whether each model is faster than the same on softmax; ``reached`` is None for what was not measured."""
    softmax = {(row["case"], row["mode"]): row for row in rows if row["mechanism"] == SOFTMAX}
    found = []
    for row in rows:
        if row["mechanism"] != SOFTMAX and row["status"] not in ("absent", "out of memory"):
            other = softmax.get((row["case"], row["mode"]), {}).get("median_ms")
            value = row["median_ms"] / other if row.get("median_ms") and other else None
            reached = None if value is None else value < 1 and row["status"] == "ok"
            own = {"case": row["case"], "mechanism": row["mechanism"], "mode": row["mode"]}
            found.append(own | {"value": value, "reached": reached})
    return found


class _Subject:
    """One model with one mechanism; its modes share the exact values and, where possible, the compiled code."""

    def __init__(self, config: Models, case: Case) -> None:
        self.config = config
        model = next(own for own in select((case["case"],)))
        self.model: ModelCase = model.quick() if self.config.quick else model
        self.mechanism, self.device = case["mechanism"], self.config.place()
        self.size = TINY if self.config.quick else FULL
        if model.kind == "language":
            text = draw_text(self.size, (self.model.batch, self.model.tokens + 1), self.device, self.config.seed)
            self.batch: tuple[Tensor, Tensor] = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        else:
            self.batch = draw_images(self.model, self.device, self.config.seed)
        self.truth: StepTruth | None = None
        self.forms: Row = {}
        self.steps: dict[str, tuple[Host, Loss, Step, float]] = {}

    def create(self, impl: str = "auto", depth: int | None = None) -> Host:
        where = self.device, self.config.seed
        if self.model.kind == "language":
            return create_model(self.size, self.mechanism, *where, impl=impl, depth=depth)
        return create_image_host(self.model, self.mechanism, *where, impl=impl, depth=depth)

    def compiled(self, mode: str, depth: int | None = None) -> tuple[Host, Loss]:
        host = self.create(depth=depth)
        return host, compile_host(host, mode, self.config.backend)

    def started(self, mode: str) -> tuple[Host, Loss, Step, float]:
        """A step that has run once, and the seconds that took; a captured step uses the compiled one."""
        code = COMPILED if mode == GRAPH else mode
        if code not in self.steps:
            self.steps.clear()  # compiled code and graphs of the other mode keep memory
            torch.compiler.reset()
            host, loss_of = self.compiled(code)
            step = make_step(host, loss_of, *self.batch, self.config.autocast, marked=mode == REDUCED)
            self.steps[code] = host, loss_of, step, first_call(step, self.device, FIRST_SECONDS)
        return self.steps[code]
