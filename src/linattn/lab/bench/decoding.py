"""`linattn decoding`: time and memory of a decoded token by the context."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, Lines, Row, hold, shared
from linattn.lab.bench.check import Verdict, watch_choices
from linattn.lab.bench.hosts import FULL, TINY, VARIANTS, ModelCase, ModelSize, TextModel, variant
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.models import softmax_kernels
from linattn.lab.bench.series import compare_with, crossovers, overtaken
from linattn.lab.bench.timing import Timing, Unmeasured, seconds_of
from linattn.lab.cases import Case, Work
from linattn.lab.train.captured_step import recorded
from linattn.layers.attention import Attention
from linattn.mechanisms.base import Call, MechanismOutput
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.mechanisms.softmax import Softmax
from linattn.models.language.block import BlockState
from linattn.support.config import option
from linattn.support.options import OptionError

EAGER, GRAPH = "eager", "cuda-graph"
WARM_STEPS, CHECKED_TOKENS = 2, 4


@dataclass(frozen=True, kw_only=True)
class Decoding(Benchmark):
    """Time and memory of a decoded token against the context, for a language model of 135 million parameters.

    The same model with softmax stands beside the mechanisms, its keys and values in a cache that is allocated once and
    written in place. Before a row is timed, the logits of its steps are checked against those of the whole context read
    at once in higher precision. The steps start from the states after the context.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (what is done is kept).
    """

    mechanisms: tuple[str, ...] = option(
        ("gated", "mlstm", "retention", "elu"), "Mechanisms, with commas; softmax is measured in any case.",
        choices=lambda: [*list_mechanisms(causal=True), *VARIANTS], affects=False,
    )  # fmt: skip
    contexts: tuple[int, ...] = option(
        (), "Tokens before the one that is decoded, with commas.", least=1, affects=False,
        default_text="1024 to 131072 by factors of two, with --quick 24,48,96",
    )  # fmt: skip
    batch: tuple[int, ...] = option((1, 16), "Sequences decoded together, with commas.", least=1, affects=False)
    modes: tuple[str, ...] = option(
        (), "How a step runs, with commas: eager, cuda-graph (captured and replayed).", choices=(EAGER, GRAPH),
        affects=False, default_text="both, on a CPU eager",
    )  # fmt: skip
    dtype: Literal["", "bfloat16", "float32"] = option(
        "", "Type of the weights.", default_text="bfloat16, on a CPU float32"
    )  # fmt: skip
    steps: int = option(16, "Tokens that are timed for a row.", least=1)
    quick: bool = option(False, "A tiny model: shows that everything runs.")

    name: ClassVar[str] = "decoding"
    keys: ClassVar[tuple[str, ...]] = ("mechanism", "context", "batch", "mode")
    lines: ClassVar[Lines] = Lines(
        "mechanism", "context", (("median_ms", "ms a token", 1), ("total_bytes", "MiB with weights", 2**20)),
        ("batch", "mode"),
    )  # fmt: skip
    columns: ClassVar[tuple[str, ...]] = (
        "batch", "mode", "context", "mechanism", "median_ms", "spread", "of_softmax", "state_MiB", "total_MiB", "budget"
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        for name in self.mechanisms:
            if mechanism_info(variant(name)[0]).state == "none":
                raise OptionError("mechanisms", f"{name} has no recurrent form, so no state to decode from")

    def filled(self) -> Self:
        contexts = self.contexts or ((24, 48, 96) if self.quick else tuple(2**n for n in range(10, 18)))
        modes, dtype = ((EAGER, GRAPH), "bfloat16") if self.on_gpu else ((EAGER,), "float32")
        own: dict[str, Any] = {"contexts": tuple(sorted(set(contexts))), "modes": self.modes or modes}
        return replace(super().filled(), **own | {"dtype": self.dtype or dtype})

    @property
    def size(self) -> ModelSize:
        return TINY if self.quick else FULL

    def cases(self) -> list[dict[str, Any]]:
        """Mechanism by mechanism, context by context, whose states are read once."""
        config = self.filled()
        return [
            self.case(mechanism=name, context=context, batch=batch, mode=mode)
            for name in dict.fromkeys((SOFTMAX, *self.mechanisms)) for context in config.contexts
            for batch in dict.fromkeys(self.batch) for mode in config.modes
        ]  # fmt: skip

    def fill(self, case: Case, work: Work, row: Row) -> None:
        mechanism, context, graph = case["mechanism"], case["context"], case["mode"] == GRAPH
        device = self.place()
        if graph and device.type != "cuda":
            raise Unmeasured("absent", "CUDA graphs need a GPU")
        work.tell(0.0, "reading the context")
        key = "decoding", mechanism, context, str(case["settings"])
        prefix = shared(key, lambda: Prefix(self, mechanism, context))
        decoder = Decoder(prefix, case["batch"])
        weights = sum(p.nbytes for p in prefix.model.parameters())
        row |= {"weight_bytes": weights, "state_bytes": decoder.state_bytes}
        work.tell(0.4, "a first step")
        with watch_choices() as choices:
            decoder.step()  # libraries allocate their workspaces, which are not memory of a step
        cached = {"scaled_dot_product_attention over the filled slots of a cache": len(prefix.model.blocks)}
        row["explain"] = cached if mechanism == SOFTMAX else dict(Counter(map(str, choices)))
        # A graph allocates when it is captured.
        row["peak_bytes"] = peak_bytes(decoder.capture if graph else decoder.step, device)
        row["total_bytes"] = row["state_bytes"] + weights + row["peak_bytes"]
        work.tell(0.5, "checking")
        decoder.restart()
        hold(row, prefix.check(decoder.read()))
        work.tell(0.8, "timing")
        decoder.restart()
        samples = [seconds_of(decoder.step, device) for _ in range(WARM_STEPS + self.steps)]
        timing = Timing.of(samples[WARM_STEPS:])
        row |= timing.row() | {"tokens_per_second": case["batch"] / timing.median}

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"model": asdict(self.size)}

    def derived(self, rows: list[Row]) -> list[Row]:
        compare_with(rows, "mechanism", SOFTMAX, "batch", "mode", "context", key="of_softmax")
        return sorted(rows, key=lambda row: (row["batch"], row["mode"], row["context"]))

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return [*overtaken(overtakes(rows)), *super().sentences(rows)]


def overtakes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where mechanisms become faster than softmax, for each batch size and mode."""
    settings = dict.fromkeys((row["batch"], row["mode"]) for row in rows if row["status"] != "absent")
    return [
        own for batch, mode in settings
        for own in crossovers(rows, "context", SOFTMAX, f"batch {batch}, {mode}", batch=batch, mode=mode)
    ]  # fmt: skip


class CachedSoftmax(Softmax):
    """:class:`Softmax` after a context, whose state has a free slot at its end, into which the next token is written.

    The library's own softmax appends every new token to its keys and values, which copies all of them. Here nothing is
    copied or masked, and there is nothing that a CUDA graph cannot hold: the fair comparison for linear attention.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        keys, values, _ = call.state
        keys[:, :, -1:].copy_(k)
        values[:, :, -1:].copy_(v)
        out = F.scaled_dot_product_attention(q, keys, values, scale=self.scale)
        return MechanismOutput(out, call.state)


class Prefix:
    """The model with one mechanism after a context of one sequence: its states, and what its next logits must be.

    ``err <= 2 (err(plain) + eps)``: plain is the whole sequence at once in the precision that is measured, and errors
    are norms of differences over the norm of the exact values, which are in fp64 on a CPU and in fp32 on a GPU.
    """

    def __init__(self, config: Decoding, mechanism: str, context: int) -> None:
        case, device = ModelCase("", 1, decoder=config.size, tokens=context + CHECKED_TOKENS), config.place()
        self.context, self.text = context, case.draw(device, config.seed)[0]
        host = case.create(mechanism, device, config.seed)
        assert isinstance(host, TextModel)
        self.model = host.to(getattr(torch, config.dtype)).eval()
        wide = torch.float64 if device.type == "cpu" else torch.float32
        with torch.no_grad(), softmax_kernels():
            _, self.states = self.model.read(self.text[:, :context], [None] * len(host.blocks))
            plain, self.exact = (self._next_logits(model) for model in (self.model, deepcopy(self.model).to(wide)))
        self.budget = 2 * (apart(plain, self.exact).item() + torch.finfo(plain.dtype).eps)
        self.against = f"fp{torch.finfo(wide).bits}, {context} tokens at once"
        self.has_cache = mechanism == SOFTMAX
        for attention in (own for own in host.modules() if isinstance(own, Attention) and self.has_cache):
            old = attention.mechanism
            attention.mechanism = CachedSoftmax(old.num_heads, old.head_dim, causal=True)

    def _next_logits(self, model: TextModel) -> Tensor:
        """Logits ``(1, n, vocabulary)`` of the tokens after the context, all read at once."""
        return model.logits(model.read(self.text)[0][:, -CHECKED_TOKENS:])

    def check(self, found: Tensor) -> Verdict:
        """Check ``found (B, n, vocabulary)``: logits of the n tokens after the context, in equal sequences."""
        errors = apart(found, self.exact[:, : found.shape[1]])
        worst = int(errors.nan_to_num(nan=torch.inf).argmax())
        error = errors[worst].item()
        return Verdict(error <= self.budget, f"logits of sequence {worst}", error, self.budget, self.against)


def apart(found: Tensor, exact: Tensor) -> Tensor:
    """Relative distances of each ``found (B, n, vocabulary)`` from ``exact (1, n, vocabulary)``."""
    difference = torch.linalg.vector_norm(found.to(exact.dtype) - exact, dim=(1, 2))
    return difference / torch.linalg.vector_norm(exact)


class Decoder:
    """A batch of sequences whose step reads one token of each, and updates next tokens, states and position.

    The states, from those of one sequence, stay in the same memory, as a CUDA graph needs it. A cache reads and writes
    the same slots at every step: the step is always the one right after the context.
    """

    def __init__(self, prefix: Prefix, batch: int) -> None:
        self.prefix, device = prefix, prefix.text.device
        self.position = torch.full((1, 1), prefix.context, device=device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.states, self.logits = self._start(), torch.empty(0)
        self.step: Callable[[], object] = self.run

    def _start(self) -> list[BlockState]:
        """The states of the prefix for every sequence; a cache gets a slot for the next token."""

        def spread(x: Tensor) -> Tensor:
            x = x.expand(len(self.tokens), *x.shape[1:])
            return F.pad(x, (0, 0, 0, 1)) if self.prefix.has_cache else x.clone()

        states: list[BlockState] = tree_map_only(Tensor, spread, self.prefix.states)
        return states

    @property
    def state_bytes(self) -> int:
        """Bytes of the states after the step."""
        return sum(x.nbytes for x in tree_leaves(self.states) if isinstance(x, Tensor))

    def restart(self) -> None:
        """Return to the position after the context."""
        self.position.fill_(self.prefix.context)
        if not self.prefix.has_cache:
            self._overwrite(self._start())

    def capture(self) -> None:
        """Turn the step into replays of a CUDA graph."""
        replay = recorded(self.run, self.position.device)
        if replay is None:
            raise Unmeasured("absent", "the step cannot be captured as a CUDA graph")
        self.step = replay

    def read(self) -> Tensor:
        """Logits ``(B, n, vocabulary)`` of the tokens after the context, read one by one by every sequence."""
        found, start = [], self.prefix.context
        for token in self.prefix.text[0, start : start + (1 if self.prefix.has_cache else CHECKED_TOKENS)]:
            self.tokens.copy_(token)
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found, dim=1)

    @torch.no_grad()
    def run(self) -> None:
        with softmax_kernels():
            x, new = self.prefix.model.read(self.tokens, self.states, self.position)
        self.logits = self.prefix.model.logits(x[:, -1])
        self._overwrite(new)
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
        self.position += 1

    def _overwrite(self, new: list[BlockState]) -> None:
        """Copy new states into the memory of the old ones; a cache was written in place and stays."""
        both = zip(tree_leaves(self.states), tree_leaves(new), strict=True)
        pairs = [(a, b) for a, b in both if isinstance(a, Tensor) and a is not b]
        if pairs:
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
