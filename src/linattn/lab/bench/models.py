"""`linattn models` and `linattn throughput`: training steps of whole models beside the same models on softmax."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, Lines, Row, clean, hold, only_quick_on_cpu, shared
from linattn.lab.bench.check import Verdict, by_kind, distances, judge, watch_choices
from linattn.lab.bench.hosts import FULL, TINY, VARIANTS, Host, ModelCase, select, variant
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.series import compare_with, crossovers, overtaken
from linattn.lab.bench.timing import Unmeasured, seconds_of, time_call
from linattn.lab.cases import Case, Work
from linattn.lab.train.captured_step import recorded
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.config import option
from linattn.support.options import OptionError

# As Python calls it; its parts compiled; that, or the eager step, captured.
CALLED, COMPILED, GRAPH, EAGER_GRAPH, REDUCED = "called", "compiled", "cuda-graph", "eager-graph", "reduce-overhead"
Batch = tuple[Tensor, Tensor]
Step = Callable[[], tuple[Tensor | None, ...]]


def softmax_kernels(*, flash_alone: bool = False) -> AbstractContextManager[object]:
    """Let PyTorch's flash kernel serve softmax, or the next that can; never cuDNN's, which plans every new length.

    ``flash_alone``: no other kernel may take its place unnoticed.
    """
    others = [] if flash_alone else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, *others], set_priority=True)


def make_step(host: Host, batch: Batch, autocast: bool, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Forward, loss and backward; loss and gradients of all parameters are returned, not stored.

    With an optimiser its step follows, and the loss alone is returned.
    """
    parameters, device_type = list(host.parameters()), batch[0].device.type

    def step() -> tuple[Tensor | None, ...]:
        if host.has_graphs:  # what the last of PyTorch's own graphs returned may be overwritten
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=autocast):
            loss = host(*batch)
        if optimizer is None:
            return loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def forms(host: Host, mechanism: str, batch: Batch, autocast: bool) -> Row:
    """Which form serves each call of attention in a forward pass without compilation, and whether all are kernels."""
    bf16 = torch.autocast(batch[0].device.type, dtype=torch.bfloat16, enabled=autocast)
    with torch.no_grad(), bf16, watch_choices() as choices:
        host(*batch)
    modules = [module for module in host.modules() if isinstance(module, Mechanism)]
    if mechanism == SOFTMAX:
        return {"explain": {"scaled_dot_product_attention: softmax is PyTorch's": len(modules)}, "on_kernels": None}
    linear = sum(module.info.name != SOFTMAX for module in modules)  # a backbone's last stages are softmax
    served = len(choices) >= linear and all(choice.impl == "triton" for choice in choices)
    return {"explain": dict(Counter(map(str, choices))), "on_kernels": served}


class StepTruth:
    """Loss and gradients of the same model with attention in plain PyTorch, in fp64 or another ``exact`` precision.

    ``err <= 2 (err(plain) + eps)``, with plain that model in the precision that is measured. Errors are norms of
    differences over the norm of the exact values, by kind of parameter and for all blocks together.

    Args:
        host: the model with a form of its mechanism in plain PyTorch; it is converted to the exact precision.
    """

    def __init__(
        self, host: Host, batch: Batch, autocast: bool, words: str, exact: torch.dtype = torch.float64
    ) -> None:
        self.batch, self.autocast, self.against = batch, autocast, f"fp{torch.finfo(exact).bits}, {words}"
        with softmax_kernels():
            plain = by_kind(host, make_step(host, batch, autocast)())
            host.to(exact)
            wide = [x.to(exact) if x.is_floating_point() else x for x in batch]
            # cuDNN rounds to tf32 and takes seconds for its plans for every new shape.
            with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
                self.exact = by_kind(host, make_step(host, (wide[0], wide[1]), False)())
        self.plain = distances(plain, self.exact)
        self.eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps

    def check(self, host: Host) -> Verdict:
        found = by_kind(host, make_step(host, self.batch, self.autocast)())
        return judge(distances(found, self.exact), self.plain, self.eps, self.against)


@dataclass(frozen=True, kw_only=True)
class Training(Benchmark):
    """Options and the measurement of benchmarks of training steps."""

    mechanisms: tuple[str, ...] = option(
        (), "Mechanisms, with commas; softmax is measured in any case.", affects=False,
        choices=lambda: [*list_mechanisms(), *VARIANTS], default_text="those of each case",
    )  # fmt: skip
    dtype: Literal["", "bfloat16", "float32"] = option(
        "", "float32, or bfloat16: autocast around fp32 weights.", default_text="bfloat16, on a CPU float32"
    )  # fmt: skip
    milliseconds: float = option(500.0, "Milliseconds of measured steps for a row.", above=0)
    quick: bool = option(False, "Tiny models: shows that everything runs, times nothing.")

    learning_rate: ClassVar[float | None] = None
    """Of AdamW, where its step is part of what is timed."""

    def check(self) -> None:
        super().check()
        only_quick_on_cpu(self, self.name)

    def filled(self) -> Self:
        return replace(super().filled(), dtype=self.dtype or ("bfloat16" if self.on_gpu else "float32"))

    def model(self, case: Case) -> ModelCase:
        """The model of a case."""
        raise NotImplementedError

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Check the loss and the gradients of a few blocks, then time and weigh steps of the whole model."""
        model, mechanism, mode = self.model(case), case["mechanism"], case.get("mode", COMPILED)
        captured = mode in (GRAPH, EAGER_GRAPH)
        device = self.place()
        row |= {"shape": model.shape, "unit": model.unit, "batch": model.batch}
        if captured and device.type != "cuda":
            raise Unmeasured("absent", "CUDA graphs need a GPU")
        # Backbones have windows with a bias of positions, which no flash kernel serves.
        flash_alone = mechanism == SOFTMAX and device.type == "cuda" and not model.is_backbone
        with softmax_kernels(flash_alone=flash_alone):
            work.tell(0.0, "computing plainly")
            key = self.name, model.name, mechanism, str(case["settings"])
            batch, served, truth = shared(key, lambda: self.computed_plainly(model, mechanism))
            row |= served
            work.tell(0.2, "compiling and checking")
            hold(row, truth.check(self.create(model.checked, mechanism, mode=mode)))
            clean()
            work.tell(0.4, "compiling")
            host = self.create(model, mechanism, mode=mode)
            row["parameters"] = sum(p.numel() for p in host.parameters())
            optimizer = None
            if self.learning_rate is not None:
                fused = device.type == "cuda"
                optimizer = torch.optim.AdamW(host.parameters(), self.learning_rate, weight_decay=0.0, fused=fused)
            step = make_step(host, batch, self.autocast, optimizer)
            row["first_seconds"] = seconds_of(step, device)
            work.tell(0.7, "timing")
            row["peak_bytes"] = peak_bytes(step, device)
            call = recorded(step, device) if captured else step
            if call is None:
                raise Unmeasured("absent", "the step cannot be captured as a CUDA graph")
            timing = time_call(call, device, self.milliseconds)
            (loss, *_) = step()
        assert loss is not None
        if not loss.isfinite():
            raise Unmeasured("WRONG", "the loss is not finite after some steps")
        row |= timing.row() | {"per_second": model.units / timing.median}
        if row["on_kernels"] is False and device.type == "cuda":
            others = [text for text in row["explain"] if not text.startswith("triton")]
            row |= {"status": "not on kernels", "reason": "; ".join(others) or "no call of attention was heard"}

    @property
    def autocast(self) -> bool:
        return self.dtype == "bfloat16"

    def create(self, model: ModelCase, mechanism: str, impl: str = "auto", *, mode: str = CALLED) -> Host:
        host = model.create(mechanism, self.place(), self.seed, impl)
        if mode in (COMPILED, GRAPH):
            host.compile_parts()
        elif mode == REDUCED:
            host.compile_whole()
        return host

    def computed_plainly(self, model: ModelCase, mechanism: str) -> tuple[Batch, Row, StepTruth]:
        """What the modes of one model have in common: a batch, the forms that serve it, and the exact step."""
        torch.compiler.reset()
        batch, checked = model.draw(self.place(), self.seed), model.checked
        plain = self.create(checked, mechanism, "auto" if mechanism == SOFTMAX else "chunked")
        words = f"{model.shape}, {checked.depth} block(s) a stage"
        truth = StepTruth(plain, batch, self.autocast, words, torch.float32 if self.on_gpu else torch.float64)
        return batch, forms(self.create(checked, mechanism), mechanism, batch, self.autocast), truth

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        precision = "fp32" if self.dtype == "float32" else "bf16 autocast, fp32 weights"
        return {"precision": precision, "model": asdict(TINY if self.quick else FULL)}


@dataclass(frozen=True, kw_only=True)
class Models(Training):
    """Training steps of whole models beside the same models on softmax.

    DeiT-small at 224 and 512 pixels, and a language model of 135 million parameters at 8192 tokens; by name the
    backbones of papers, with a chart of time and memory over softmax against the size of images. Each row's loss and
    gradients are checked against plain PyTorch in the same run, in a model with one or two blocks a stage; every call
    of attention says what it takes.

    Exit code: 0 all right, 1 a row was WRONG, failed or not on kernels, 2 a bad option, 130 interrupted (what is done
    is kept).
    """

    only: tuple[str, ...] = option(
        (), "Cases, with commas: vit-224, vit-512, language-8192-b1, language-8192-b4 (the default: these four); "
        "backbones, the smallest of every family at 224, 384, 512 and 1024 pixels, backbones-224 at one of these; "
        "presets and presets-224, all models of all families; any model of timm's linattn_* by name and size, such as "
        "nalaformer_small-512.", affects=False,
    )  # fmt: skip
    modes: tuple[str, ...] = option(
        (COMPILED, GRAPH), "How a step runs, with commas: called, compiled, cuda-graph (of the compiled step), "
        "reduce-overhead (PyTorch's own graphs), eager-graph (a CUDA graph of the step without torch.compile: the "
        "shortest to prepare, for many models).",
        choices=(CALLED, COMPILED, GRAPH, EAGER_GRAPH, REDUCED), affects=False,
    )  # fmt: skip

    name: ClassVar[str] = "models"
    keys: ClassVar[tuple[str, ...]] = ("case", "mechanism", "mode")
    lines: ClassVar[Lines] = Lines(
        "of", "pixels", (("over_softmax", "time over softmax", 1), ("memory_over_softmax", "memory over softmax", 1))
    )  # fmt: skip
    columns: ClassVar[tuple[str, ...]] = (
        "case", "mechanism", "mode", "median_ms", "over_softmax", "per_second", "peak_MiB", "budget"
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        select(self.only)

    @property
    def file_name(self) -> str:
        return "backbones" if self.only else self.name

    def cases(self) -> list[dict[str, Any]]:
        """Model by model, softmax first; each mechanism in every mode."""
        found = []
        for model in select(self.only):
            able = list_mechanisms(causal=True) if model.tokens else list_mechanisms(bidirectional=True)
            asked = [name for name in self.mechanisms if variant(name)[0] in able] or model.mechanisms
            for name in dict.fromkeys((SOFTMAX, *asked)):
                found += [self.case(case=model.name, mechanism=name, mode=mode) for mode in self.modes]
        return found

    def model(self, case: Case) -> ModelCase:
        (model,) = select((case["case"],))
        return model.quick() if self.quick else model

    def derived(self, rows: list[Row]) -> list[Row]:
        compare_with(rows, "mechanism", SOFTMAX, "case", "mode", key="over_softmax")
        compare_with(rows, "mechanism", SOFTMAX, "case", "mode", value="peak_bytes", key="memory_over_softmax")
        for row in rows:
            model, _, pixels = row["case"].rpartition("-")
            if row.get("unit") == "images" and row["mechanism"] != SOFTMAX:
                row |= {"of": f"{model}, {row['mechanism']}, {row['mode']}", "pixels": int(pixels)}
        return rows

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        timed = [row for row in rows if row["mechanism"] != SOFTMAX and row.get("over_softmax") is not None]
        faster = sum(row["over_softmax"] < 1 and row["status"] == "ok" for row in timed)
        said = [f"{faster} of {len(timed)} beat the same model on softmax."] if timed else []
        return [*said, *super().sentences(rows)]


@dataclass(frozen=True, kw_only=True)
class Throughput(Training):
    """Training tokens per second against the length of sequences, for a language model of 135 million parameters.

    A step is forward, loss, backward and AdamW, compiled, with as many tokens at every length. The same model with
    softmax on PyTorch's flash kernel stands beside the mechanisms. Before a row is timed, the loss and gradients of two
    of its layers are checked against plain PyTorch.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (what is done is kept).
    """

    mechanisms: tuple[str, ...] = option(
        ("gated", "mlstm", "retention", "elu"), "Mechanisms, with commas; softmax is measured in any case.",
        choices=lambda: [*list_mechanisms(causal=True), *VARIANTS], affects=False,
    )  # fmt: skip
    lengths: tuple[int, ...] = option(
        (), "Lengths of the sequences, with commas.", least=1, affects=False,
        default_text="2048,8192,32768, with --quick 16,32,64",
    )  # fmt: skip
    tokens: int = option(
        0, "Tokens of a step, a multiple of every length.", least=0, default_text="as many as the longest sequence has"
    )  # fmt: skip

    learning_rate: ClassVar[float | None] = 1e-5
    name: ClassVar[str] = "throughput"
    keys: ClassVar[tuple[str, ...]] = ("mechanism", "length")
    lines: ClassVar[Lines] = Lines(
        "mechanism", "length", (("tokens_per_second", "thousand tokens/s", 1000), ("peak_bytes", "peak GiB", 2**30))
    )  # fmt: skip
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
        return replace(super().filled(), lengths=lengths, tokens=self.tokens or max(lengths))

    def cases(self) -> list[dict[str, Any]]:
        names, lengths = dict.fromkeys((SOFTMAX, *self.mechanisms)), sorted(set(self.filled().lengths))
        return [self.case(mechanism=name, length=T) for name in names for T in lengths]

    def model(self, case: Case) -> ModelCase:
        size, length = TINY if self.quick else FULL, case["length"]
        return ModelCase(f"language-{length}", self.tokens // length, decoder=size, tokens=length)

    def derived(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            row["tokens_per_second"] = row.pop("per_second", None)
        compare_with(rows, "mechanism", SOFTMAX, "length", key="of_softmax")
        return rows

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return [*overtaken(crossovers(rows, "length", SOFTMAX, "training")), *super().sentences(rows)]
