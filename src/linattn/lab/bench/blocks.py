"""`linattn memory`: memory and time of one transformer block by the number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isqrt
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, Lines, Row, hold, shared
from linattn.lab.bench.check import Verdict
from linattn.lab.bench.hosts import Host
from linattn.lab.bench.memory import check_affordable, peak_bytes
from linattn.lab.bench.models import StepTruth
from linattn.lab.bench.series import compare_with
from linattn.lab.bench.timing import measure_in_turns
from linattn.lab.cases import Case, Work
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.vision.block import Block
from linattn.support.config import option

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
    max_seconds: float = option(30.0, "Leave out what is predicted to take longer per pass.", above=0)
    max_gib: float | None = option(
        None, "Leave out what is predicted to need more.", above=0,
        default_text="half of what is free on a CPU, a GPU tries all",
    )  # fmt: skip

    name: ClassVar[str] = "block-memory"
    keys: ClassVar[tuple[str, ...]] = ("contender", "tokens")
    lines: ClassVar[Lines] = Lines("contender", "tokens")
    columns: ClassVar[tuple[str, ...]] = ("tokens", "contender", "peak_MiB", "of_softmax", "median_ms", "budget")

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
        device, name = self.place(), case["contender"]
        work.tell(0.1, "checking")
        host, verdict = shared(("block", name, str(case["settings"])), lambda: checked_block(self, name))
        hold(row, verdict)

        def call_at(tokens: int) -> Callable[[], object]:
            return training_pass(host.blocks[0], draw_tokens(self, tokens), self.autocast)

        work.tell(0.2, "predicting")
        most = inf if self.max_gib is None and device.type == "cuda" else self.max_gib
        check_affordable(lambda n: (call_at(n), call_at(n)), case["tokens"], device, self.max_seconds, most)
        work.tell(0.5, "measuring")
        call = call_at(case["tokens"])
        row["peak_bytes"] = peak_bytes(call, device)
        timing = measure_in_turns({"": call}, device, min_seconds=0, min_repeats=3)[""]
        row |= timing.row() | {"seconds": timing.median}

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"counted": COUNTED}

    def derived(self, rows: list[Row]) -> list[Row]:
        compare_with(rows, "contender", SOFTMAX, "tokens", value="peak_bytes", key="of_softmax")
        return sorted(rows, key=lambda row: row["tokens"])


class BlockHost(Host):
    """A block whose loss is how far its output is from ``targets (B, T, C)``."""

    def __init__(self, config: Blocks, contender: str, impl: str) -> None:
        super().__init__()
        name = SOFTMAX if contender == SOFTMAX_MAP else contender
        self.blocks = nn.ModuleList([Block(config.dim, config.heads, name, attention={"impl": impl})])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.blocks[0](inputs, near_square(inputs.shape[1])) - targets).square().mean()


def create_block(config: Blocks, contender: str, impl: str = "") -> BlockHost:
    """The block in fp32; all forms of a mechanism get the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        host = BlockHost(config, contender, impl or ("reference" if contender == SOFTMAX_MAP else "auto"))
    return host.to(config.place())


def checked_block(config: Blocks, contender: str) -> tuple[BlockHost, Verdict]:
    """The block, checked against the full matrix of weights or, with a materialised map, PyTorch's softmax."""
    x = draw_tokens(config, 2 * CHECKED_TOKENS)[:1]
    host, plain = create_block(config, contender), "auto" if contender == SOFTMAX_MAP else "reference"
    batch = x[:, :CHECKED_TOKENS], x[:, CHECKED_TOKENS:]
    truth = StepTruth(create_block(config, contender, plain), batch, config.autocast, f"{CHECKED_TOKENS} tokens")
    return host, truth.check(host)


def near_square(tokens: int) -> tuple[int, int]:
    """``(height, width)`` with ``height <= width`` and ``height width = tokens``, as near to a square as possible.

    Example:
        >>> near_square(196), near_square(70000), near_square(7)
        ((14, 14), (250, 280), (1, 7))
    """
    height = next(n for n in range(isqrt(tokens), 0, -1) if tokens % n == 0)
    return height, tokens // height


def draw_tokens(config: Blocks, tokens: int) -> Tensor:
    """Draw normal numbers ``(B, T, C)`` in fp32, the same ones on every device."""
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randn(config.batch, tokens, config.dim, generator=generator).to(config.place())


def training_pass(block: nn.Module, source: Tensor, autocast: bool) -> Callable[[], object]:
    """Forward and backward over a copy of ``source``, with all memory that they need: see ``COUNTED``.

    The copy, the gradient of the output (as a layer above would send it), and the gradients of the input and of every
    parameter are allocated inside the call, so that they count.
    """
    spatial_shape, parameters = near_square(source.shape[1]), list(block.parameters())

    def call() -> object:
        x = source.clone().requires_grad_()
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            output = block(x, spatial_shape)
        return torch.autograd.grad(output, [x, *parameters], torch.ones_like(output), allow_unused=True)

    return call
