"""`linattn memory`: memory and time of one transformer block by the number of tokens."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf, isqrt
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, note, setting
from linattn.lab.bench.charts import by_length
from linattn.lab.bench.check import Verdict, budgets_of, judge, relative_errors
from linattn.lab.bench.fit import times_by
from linattn.lab.bench.memory import Cost, free_bytes, peak_bytes, predict
from linattn.lab.bench.running import Row, shared
from linattn.lab.bench.timing import measure_in_turns, seconds_of
from linattn.lab.cases import Case, Work
from linattn.lab.page.plots import Chart, styles
from linattn.mechanisms.registry import create_mechanism, list_mechanisms, mechanism_info
from linattn.models.vision.block import Block
from linattn.support.config import option
from linattn.support.options import OptionError

SOFTMAX_MAP = "softmax (map)"
CHECKED_TOKENS = 196
COUNTED = (
    "peak_bytes: the most that forward and backward of one block allocate at one time. Counted: the input, the output, "
    "what is kept for backward, temporaries, and the gradients of output, input and parameters. Not counted: the "
    "parameters themselves (fp32; their copies in bf16 under autocast do count). softmax (map) keeps its map in fp32."
)


@dataclass(frozen=True, kw_only=True)
class Blocks(Benchmark):
    """Memory and time of one transformer block against the number of tokens, forward with backward.

    Softmax attention stands beside the mechanisms twice: as PyTorch computes it, and with a materialised map. Each
    block is checked against fp64 first. Weights do not count, their gradients do.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (what is done is kept).
    """

    tokens: tuple[int, ...] = option(
        (196, 784, 3136, 6400, 12544, 25600, 50176, 70000), "Numbers of tokens, with commas.", least=1, affects=False
    )  # fmt: skip
    mechanisms: tuple[str, ...] = option(
        ("mirror", "nala"), "Registered mechanisms, with commas; softmax is there anyway.", affects=False,
        choices=lambda: list_mechanisms(bidirectional=True),
    )  # fmt: skip
    dim: int = option(192, "Width of the block.", least=1)
    heads: int = option(3, "Number of heads.", least=1)
    batch: int = option(1, "Batch size.", least=1)
    precision: Literal["auto", "fp32", "bf16"] = option("auto", "fp32, bf16 (autocast), or auto: bf16 on a GPU.")
    repeats: int = option(3, "Timed passes.", least=1, rare=True)
    max_seconds: float = option(30.0, "Leave out what is predicted to take longer per pass.", above=0)
    max_gib: float | None = option(
        None, "Leave out what is predicted to need more.", above=0,
        default_text="half of what is free on a CPU, a GPU tries all",
    )  # fmt: skip

    name: ClassVar[str] = "block-memory"
    keys: ClassVar[tuple[str, ...]] = ("contender", "tokens")
    columns: ClassVar[tuple[str, ...]] = ("tokens", "contender", "peak_MiB", "of_softmax", "median_ms", "budget")

    def check(self) -> None:
        super().check()
        if self.dim % self.heads:
            raise OptionError("heads", f"must divide dim, got {self.heads} heads and dim {self.dim}")
        if not self.tokens or not self.mechanisms:
            raise OptionError("mechanisms" if self.tokens else "tokens", "name at least one")
        for name in self.mechanisms:
            try:
                create_mechanism(name, num_heads=self.heads, head_dim=self.dim // self.heads)
            except ValueError as error:  # a width that this mechanism cannot have
                raise OptionError("mechanisms", f"{name}: {error}") from error

    def filled(self) -> Self:
        """By default on a CPU, and there in fp32, as bf16 around fp32 weights is for training on a GPU."""
        device = self.device or "cpu"
        kind: Literal["fp32", "bf16"] = "fp32" if device == "cpu" else "bf16"
        return replace(self, device=device, precision=kind if self.precision == "auto" else self.precision)

    @property
    def autocast(self) -> bool:
        return self.filled().precision == "bf16"

    def cases(self) -> list[dict[str, Any]]:
        """Contender by contender, so that each is checked once."""
        names = dict.fromkeys((SOFTMAX, SOFTMAX_MAP, *self.mechanisms))
        return [self.case(contender=name, tokens=T) for name in names for T in sorted(set(self.tokens))]

    def fill(self, case: Case, work: Work, row: Row) -> None:
        name = case["contender"]
        device = self.place()

        def checked() -> tuple[Block, Verdict]:
            work.tell(0.1, "checking")
            block = create_block(self, name)
            # In the check libraries also allocate their workspaces, which are then not counted.
            return block, check_block(self, name, block)

        block, verdict = shared(("block", name, str(case["settings"])), checked)
        if not note(row, verdict):
            return
        given = inf if device.type == "cuda" else free_bytes(device) / 2
        limits = self.max_seconds, given if self.max_gib is None else self.max_gib * 2**30
        # The memory of softmax grows with power 1 if PyTorch has a kernel for it, which a prediction must not rely on.
        power = 1 if mechanism_info(SOFTMAX if name == SOFTMAX_MAP else name).cost == "linear" else 2

        def probe(tokens: int) -> Cost:
            call = training_pass(block, draw_tokens(self, tokens, self.batch), self.autocast)
            peak = peak_bytes(call, device)
            return Cost(tokens, min(seconds_of(call, device) for _ in range(2)), peak, (power, power))

        work.tell(0.2, "predicting")
        reason = predict(probe, case["tokens"], *limits).excess(*limits)
        if reason:
            row |= {"status": "left out", "reason": reason}
            return
        call = training_pass(block, draw_tokens(self, case["tokens"], self.batch), self.autocast)
        work.tell(0.5, "measuring")
        peak = peak_bytes(call, device)
        timing = measure_in_turns({"": call}, device, min_seconds=0, min_repeats=self.repeats)[""]
        row |= {"peak_bytes": peak, "seconds": timing.median} | timing.row()

    def described(self, outcomes: Sequence[Any], rows: Sequence[Row]) -> dict[str, Any]:
        total = torch.cuda.get_device_properties(self.place()).total_memory if self.on_gpu else None
        return {"counted": COUNTED, "device_memory_bytes": total}

    def derived(self, rows: list[Row]) -> list[Row]:
        rows = sorted(rows, key=lambda row: row["tokens"])
        peaks = times_by(rows, "tokens", "peak_bytes", contender=SOFTMAX)
        for row in rows:
            if row.get("peak_bytes") and row["tokens"] in peaks:
                row["of_softmax"] = row["peak_bytes"] / peaks[row["tokens"]]
        return rows

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        found = [
            f"{r['contender']}: {abs(r['percent']):.1f} % {'less' if r['percent'] >= 0 else 'more'} memory than "
            f"{r['against']} at {r['tokens']:,} tokens"
            for r in reductions(rows)
        ]
        left = any(row["status"] == "left out" for row in rows)
        return found + (["left out by predicted cost; --max-seconds and --max-gib move the limits"] if left else [])

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        looks, s = styles(list(dict.fromkeys(row["contender"] for row in rows))), meta["settings"]
        values = (("peak_bytes", "peak MiB", 2**20), ("median_ms", "ms", 1.0))
        panels = [
            by_length(rows, "contender", "tokens", value, "a block", ylabel, unit, looks)
            for value, ylabel, unit in values
        ]
        shape = f"one block, width {s['dim']}, {s['heads']} heads, batch {s['batch']}, {s['precision']}"
        return [
            Chart("block-memory", setting(meta, shape), "Crosses: what did not fit or was left out.", panels, looks)
        ]


def reductions(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Percent less memory of each mechanism than softmax has, at the most tokens where both fit; below 0: more."""
    names = dict.fromkeys(row["contender"] for row in rows)
    peaks = {name: times_by(rows, "tokens", "peak_bytes", contender=name) for name in names}
    found = []
    for name in (name for name in names if name not in (SOFTMAX, SOFTMAX_MAP)):
        for against in (SOFTMAX_MAP, SOFTMAX):
            both = peaks[name].keys() & peaks.get(against, {}).keys()
            if both:
                share = peaks[name][max(both)] / peaks[against][max(both)]
                found.append(
                    {"contender": name, "against": against, "tokens": max(both), "percent": 100 * (1 - share)}
                )  # fmt: skip
    return found


def create_block(config: Blocks, contender: str, twin: bool = False) -> Block:
    """The block in fp32; ``twin``: with the other form of its mechanism, and the same weights."""
    plain = (contender == SOFTMAX_MAP) != twin
    name = SOFTMAX if contender == SOFTMAX_MAP else contender
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        block = Block(config.dim, config.heads, name, attention={"impl": "reference" if plain else "auto"})
    return block.to(config.place())


def check_block(config: Blocks, contender: str, block: Block) -> Verdict:
    """Check outputs and gradients of a block against fp64.

    The exact values are those of the block in fp64 with the other form of its mechanism: the full matrix of weights
    or, for softmax with a materialised map, PyTorch's own softmax attention; plain is that form in the precision that
    is measured. The residual hides what attention adds to it, so the attention layer is also checked by itself: its
    output, and the gradients of its q, k and v. The exact computation starts from the block's own q, k and v, with
    their rounding: a value near 0 that rounding moves over the kink of a ReLU changes a gradient completely, and would
    hide any other error.
    """
    twin = create_block(config, contender, twin=True)
    x = draw_tokens(config, CHECKED_TOKENS, batch=1)
    grad = draw_tokens(config, CHECKED_TOKENS + 1, batch=1)[:, 1:]
    with torch.no_grad(), precision_of(x.device, config.autocast):
        qkv = _projection(block)(block.norm1(x))
    found = _results(block, x, grad, qkv, config.autocast)
    plain = _results(twin, x, grad, qkv, config.autocast)
    exact = _results(twin.double(), x.double(), grad.double(), qkv.double(), autocast=False)
    budgets = budgets_of(relative_errors(plain, exact), torch.bfloat16 if config.autocast else torch.float32)
    return judge(relative_errors(found, exact), budgets, f"fp64, {CHECKED_TOKENS} tokens")


def _projection(block: Block) -> nn.Linear:
    assert block.attn.qkv is not None
    return block.attn.qkv


def _results(block: Block, x: Tensor, grad: Tensor, qkv: Tensor, autocast: bool) -> dict[str, Tensor]:
    """Results of the block with ``qkv (B, T, 3C)`` as values of its projection; the gradient still flows to x."""
    seen: dict[str, Tensor] = {}

    def replaced(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        seen["qkv"] = output + (qkv - output).detach()
        return seen["qkv"]

    hooks = [
        _projection(block).register_forward_hook(replaced),
        block.attn.register_forward_hook(lambda module, inputs, output: seen.update(attention=output)),
    ]
    try:
        x = x.detach().clone().requires_grad_()
        with precision_of(x.device, autocast):
            output = block(x, near_square(x.shape[1]))
    finally:
        for hook in hooks:
            hook.remove()
    to_x, to_qkv = torch.autograd.grad(output, [x, seen["qkv"]], grad.to(output.dtype))
    found = {"output": output, "output of attention": seen["attention"], "gradient of x": to_x}
    parts = zip("qkv", to_qkv.chunk(3, dim=-1), strict=True)
    return {name: t.detach() for name, t in (found | {f"gradient of {own}": part for own, part in parts}).items()}


def near_square(tokens: int) -> tuple[int, int]:
    """``(height, width)`` with ``height <= width`` and ``height width = tokens``, as near to a square as possible.

    Example:
        >>> near_square(196), near_square(70000), near_square(7)
        ((14, 14), (250, 280), (1, 7))
    """
    height = next(n for n in range(isqrt(tokens), 0, -1) if tokens % n == 0)
    return height, tokens // height


def draw_tokens(config: Blocks, tokens: int, batch: int) -> Tensor:
    """Draw normal numbers ``(B, T, C)`` in fp32, the same ones on every device."""
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randn(batch, tokens, config.dim, generator=generator).to(config.place())


def precision_of(device: torch.device, autocast: bool) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast)


def training_pass(block: nn.Module, source: Tensor, autocast: bool) -> Callable[[], object]:
    """Forward and backward over a copy of ``source``, with all memory that they need: see ``COUNTED``.

    The copy, the gradient of the output (as a layer above would send it), and the gradients of the input and of every
    parameter are allocated inside the call, so that they count.
    """
    spatial_shape, parameters = near_square(source.shape[1]), list(block.parameters())

    def call() -> object:
        x = source.clone().requires_grad_()
        with precision_of(x.device, autocast):
            output = block(x, spatial_shape)
        return torch.autograd.grad(output, [x, *parameters], torch.ones_like(output), allow_unused=True)

    return call
