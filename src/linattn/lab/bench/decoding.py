"""`linattn decoding`: time and memory of a decoded token by the context."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves, tree_map_only

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, Lines, Row, hold, shared
from linattn.lab.bench.check import Verdict, served_by, watch_choices
from linattn.lab.bench.hosts import FULL, TINY, VARIANTS, ModelCase, ModelSize, TextModel, variant
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.series import compare_with, crossovers, overtaken
from linattn.lab.bench.steps import softmax_kernels
from linattn.lab.bench.timing import Timing, Unmeasured, capture, seconds_of
from linattn.lab.cases import Work
from linattn.lab.kept import Case
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
    at once in higher precision. The context is read in pieces, and its state is what the steps start from.

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
    kv_heads: int = option(0, "Heads of keys and values; 0: as many as of queries, 9.", least=0)
    steps: int = option(16, "Tokens that are timed for a row.", least=1)
    piece: int = option(8192, "Tokens of a context that are read at a time.", least=1)
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
        if self.size.heads % self.size.kv_heads:
            raise OptionError("kv_heads", f"must divide the model's {self.size.heads} heads, got {self.kv_heads}")

    def filled(self) -> Self:
        contexts = self.contexts or ((24, 48, 96) if self.quick else tuple(2**n for n in range(10, 18)))
        modes, dtype = ((EAGER, GRAPH), "bfloat16") if self.on_gpu else ((EAGER,), "float32")
        own: dict[str, Any] = {"contexts": tuple(sorted(set(contexts))), "modes": self.modes or modes}
        return replace(super().filled(), dtype=self.dtype or dtype, **own)

    @property
    def size(self) -> ModelSize:
        base = TINY if self.quick else FULL
        return replace(base, kv_heads=self.kv_heads or base.heads)

    def cases(self) -> list[dict[str, Any]]:
        """Mechanism by mechanism, from short to long contexts, as each continues the one before it."""
        config = self.filled()
        return [
            self.case(mechanism=name, context=context, batch=batch, mode=mode, longest=config.contexts[-1])
            for name in dict.fromkeys((SOFTMAX, *self.mechanisms)) for context in config.contexts
            for batch in dict.fromkeys(self.batch) for mode in config.modes
        ]  # fmt: skip

    def fill(self, case: Case, work: Work, row: Row) -> None:
        mechanism, context, graph = case["mechanism"], case["context"], case["mode"] == GRAPH
        device = self.place()
        if graph and device.type != "cuda":
            raise Unmeasured("absent", "CUDA graphs need a GPU")
        work.tell(0.0, "reading the context")
        key = "decoding", mechanism, case["longest"], str(case["settings"])
        subject = shared(key, lambda: Subject(self, mechanism, case["longest"]))
        states = subject.states_after(context)
        decoder = Decoder(subject.model, states, context, case["batch"])
        weights = sum(p.nbytes for p in subject.model.parameters())
        row |= {"weight_bytes": weights, "state_bytes": state_bytes(decoder.states)}
        work.tell(0.4, "a first step")
        with watch_choices() as choices:
            decoder.step()  # libraries allocate their workspaces, which are not memory of a step
        cached = {"scaled_dot_product_attention over the filled slots of a cache": len(subject.model.blocks)}
        row["explain"] = cached if mechanism == SOFTMAX else served_by(choices)
        # A graph allocates when it is captured.
        row["peak_bytes"] = peak_bytes(decoder.capture if graph else decoder.step, device)
        row["total_bytes"] = row["state_bytes"] + weights + row["peak_bytes"]
        work.tell(0.5, "checking")
        decoder.restart(states)
        tokens = subject.text[context : context + (1 if decoder.has_cache else CHECKED_TOKENS)]
        hold(row, subject.check(decoder.read(tokens), context))
        work.tell(0.8, "timing")
        decoder.restart(states)
        samples = [seconds_of(decoder.step, device) for _ in range(WARM_STEPS + self.steps)]
        timing = Timing.of(samples[WARM_STEPS:])
        row |= timing.row() | {"tokens_per_second": case["batch"] / timing.median}

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"model": asdict(self.size)}

    def derived(self, rows: list[Row]) -> list[Row]:
        compare_with(rows, "mechanism", SOFTMAX, "batch", "mode", "context", key="of_softmax")
        return sorted(rows, key=lambda row: (row["batch"], row["mode"], row["context"]))

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        forms = (f"{row['mechanism']}: {'; '.join(row['explain'])}" for row in rows if row.get("explain"))
        return [*overtaken(overtakes(rows)), *dict.fromkeys(forms)]

    def setting(self, meta: Mapping[str, Any]) -> str:
        return str(self.dtype)


def overtakes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where mechanisms become faster than softmax, for each batch size and mode."""
    settings = dict.fromkeys((row["batch"], row["mode"]) for row in rows if row["status"] != "absent")
    return [
        own for batch, mode in settings
        for own in crossovers(rows, "context", SOFTMAX, f"batch {batch}, {mode}", batch=batch, mode=mode)
    ]  # fmt: skip


class StaticCache(NamedTuple):
    """Keys and values ``(B, H_kv, room, D)``, of which the first ``length`` slots are filled."""

    keys: Tensor
    values: Tensor
    length: int


class CachedSoftmax(Softmax):
    """:class:`Softmax` whose state is a :class:`StaticCache`, allocated once: the fair comparison for linear attention.

    The library's own softmax appends every new token to its cache, which copies all of it. Here a token is written into
    its slot, and attention reads the slots that are filled: no copy, no mask, and nothing that a CUDA graph cannot
    hold.
    """

    state_type: ClassVar[type] = StaticCache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if not call.need_state:
            return super().attend(q, k, v, call)
        keys, values, start = call.state
        end = start + k.shape[2]
        keys[:, :, start:end].copy_(k)
        values[:, :, start:end].copy_(v)
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": self.is_grouped}
        if q.shape[2] > 1:  # the last query belongs to the last key
            options |= {"attn_mask": causal_lower_right(q.shape[2], end)} if start else {"is_causal": True}
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], **options)
        return MechanismOutput(out, StaticCache(keys, values, end))


class Subject:
    """The model with one mechanism; its rows share the states after a context, and the exact values.

    ``err <= 2 (err(plain) + eps)``: plain is the whole prefix at once in the precision that is measured, and errors are
    norms of differences over the norm of the exact values, which are in fp64 on a CPU and in fp32 on a GPU.
    """

    def __init__(self, config: Decoding, mechanism: str, longest: int) -> None:
        self.piece, device = config.piece, config.place()
        model = ModelCase("decoder", 1, decoder=config.size, tokens=longest + CHECKED_TOKENS)
        self.text = model.draw(device, config.seed)[0][0]
        host = model.create(mechanism, device, config.seed)
        assert isinstance(host, TextModel)
        self.model = host.to(getattr(torch, config.dtype)).eval()
        self.empty: list[BlockState | None] = [None] * len(host.blocks)
        for number, attention in enumerate(own for own in host.modules() if isinstance(own, Attention)):
            old = attention.mechanism
            if type(old) is Softmax:
                heads: dict[str, Any] = {"num_kv_heads": old.num_kv_heads, "causal": True}
                attention.mechanism = CachedSoftmax(old.num_heads, old.head_dim, scale=old.scale, **heads)
                room = 2, 1, old.num_kv_heads, len(self.text), old.head_dim
                keys, values = host.embedding.weight.new_empty(room).unbind()
                self.empty[number] = BlockState(StaticCache(keys, values, 0))
        self.exact_model = deepcopy(self.model).to(torch.float64 if device.type == "cpu" else torch.float32)
        self.length, self.states = 0, self.empty
        self.logits = cache(self._logits)

    @torch.no_grad()
    def states_after(self, context: int) -> Sequence[BlockState | None]:
        """States after the first ``context`` tokens, which are read in pieces, on from the context before."""
        if context < self.length:
            self.length, self.states = 0, self.empty
        while self.length < context:
            end = min(self.length + self.piece, context)
            with softmax_kernels():
                _, self.states = self.model.read(self.text[None, self.length : end], self.states, self.length)
            self.length = end
        return self.states

    @torch.no_grad()
    def _logits(self, exact: bool, context: int) -> Tensor:
        """Logits ``(n, vocabulary)`` of the tokens after a context, all read at once."""
        model = self.exact_model if exact else self.model
        with softmax_kernels():
            x, _ = model.read(self.text[None, : context + CHECKED_TOKENS])
        return model.logits(x[0, -CHECKED_TOKENS:])

    def check(self, found: Tensor, context: int) -> Verdict:
        """Check ``found (B, n, vocabulary)``: logits of the n tokens after the context, in equal sequences."""
        exact, eps = self.logits(True, context), torch.finfo(self.model.embedding.weight.dtype).eps
        budget = 2 * (apart(self.logits(False, context)[None], exact).item() + eps)
        against = f"{'fp64' if exact.dtype == torch.float64 else 'fp32'}, {context} tokens at once"
        errors = apart(found, exact[: found.shape[1]])
        worst = int(errors.nan_to_num(nan=torch.inf).argmax())
        error = errors[worst].item()
        return Verdict(error <= budget, f"logits of sequence {worst}", error, budget, against)


def apart(found: Tensor, exact: Tensor) -> Tensor:
    """Relative distances of each ``found (B, n, vocabulary)`` from ``exact (n, vocabulary)``."""
    difference = torch.linalg.vector_norm(found.to(exact.dtype) - exact, dim=(1, 2))
    return difference / torch.linalg.vector_norm(exact)


def spread(state: BlockState | None, batch: int) -> BlockState:
    """Copy the state of one sequence for a batch of them; a cache gets room for one token."""
    assert state is not None
    cache = state.mechanism
    if isinstance(cache, StaticCache):
        filled = [x[:, :, : cache.length + 1].expand(batch, -1, -1, -1).clone() for x in (cache.keys, cache.values)]
        return BlockState(StaticCache(filled[0], filled[1], cache.length))
    own: BlockState = tree_map_only(Tensor, lambda x: x.expand(batch, *x.shape[1:]).clone(), state)
    return own


def state_bytes(states: list[BlockState]) -> int:
    """Bytes of the states; the free slot of a cache does not count."""
    total = sum(x.nbytes for x in tree_leaves(states) if isinstance(x, Tensor))
    caches = [state.mechanism for state in states if isinstance(state.mechanism, StaticCache)]
    return total - sum(2 * cache.keys[:, :, cache.length :].numel() * cache.keys.element_size() for cache in caches)


class Decoder:
    """A batch of sequences whose step reads one token of each, and updates next tokens, states and position.

    The states, from those of one sequence, stay in the same memory, as a CUDA graph needs it. A cache reads and writes
    the same slots at every step: the step is always the one right after the context.
    """

    def __init__(self, model: TextModel, states: Sequence[BlockState | None], length: int, batch: int) -> None:
        self.model, self.length, device = model, length, model.embedding.weight.device
        self.states = [spread(state, batch) for state in states]
        self.has_cache = any(isinstance(state.mechanism, StaticCache) for state in self.states)
        self.position = torch.full((1, 1), length, device=device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.logits = torch.empty(0)
        self.step: Callable[[], None] = self.run

    def restart(self, states: Sequence[BlockState | None]) -> None:
        """Return to the position after the context."""
        self.position.fill_(self.length)
        if not self.has_cache:
            self._overwrite([spread(state, len(self.tokens)) for state in states])

    def capture(self) -> None:
        """Turn the step into replays of a CUDA graph."""
        replay = capture(self.run)
        if replay is None:
            raise Unmeasured("absent", "the step cannot be captured as a CUDA graph")
        self.step = replay

    def read(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, n, vocabulary)`` of ``tokens (n,)``, read one by one by every sequence."""
        found = []
        for token in tokens:
            self.tokens.copy_(token)
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found, dim=1)

    @torch.no_grad()
    def run(self) -> None:
        with softmax_kernels():
            x, new = self.model.read(self.tokens, self.states, self.position)
        self.logits = self.model.logits(x[:, -1])
        self._overwrite(new)
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
        self.position += 1

    def _overwrite(self, new: list[BlockState]) -> None:
        """Copy new states into the memory of the old ones; a cache was written in place and stays."""
        both = zip(tree_leaves(self.states), tree_leaves(new), strict=True)
        pairs = [(a, b) for a, b in both if isinstance(a, Tensor) and a is not b]
        if pairs:
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
