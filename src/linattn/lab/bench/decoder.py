"""Decodes token by token from the states after a context, called from Python or as a CUDA graph, and is checked.

Softmax keeps its keys and values in a cache that is allocated once, as the fair comparison for linear attention. The
library's own softmax appends every new token to its cache, which copies all of it. With this cache a token is written
into its slot, and attention reads the slots that are filled: no copy, no mask, and nothing that a CUDA graph cannot
hold.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves, tree_map_only

from linattn.lab.bench.check import Verdict
from linattn.lab.bench.language import TextModel
from linattn.lab.bench.steps import ANY_SOFTMAX
from linattn.lab.bench.timing import capture
from linattn.layers.attention import Attention
from linattn.mechanisms.base import Call, MechanismOutput
from linattn.mechanisms.softmax import Softmax
from linattn.models.language.block import BlockState

CHECKED_TOKENS = 4
EXACT_UP_TO = 32768


class StaticCache(NamedTuple):
    """Keys and values ``(B, H_kv, room, D)``, of which the first ``length`` slots are filled."""

    keys: Tensor
    values: Tensor
    length: int


class CachedSoftmax(Softmax):
    """:class:`Softmax` whose state is a :class:`StaticCache`, written in place."""

    state_type: ClassVar[type] = StaticCache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if not call.need_state:
            return super().attend(q, k, v, call)
        keys, values, start = call.state
        end = start + k.shape[2]
        if end > keys.shape[2]:
            raise ValueError(f"the cache has room for {keys.shape[2]} tokens, and {end} were given")
        keys[:, :, start:end].copy_(k)
        values[:, :, start:end].copy_(v)
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": self.is_grouped}
        if q.shape[2] > 1:  # the last query belongs to the last key
            options |= {"attn_mask": causal_lower_right(q.shape[2], end)} if start else {"is_causal": True}
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], **options)
        return MechanismOutput(out, StaticCache(keys, values, end))


def _attentions(model: TextModel) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def use_static_cache(model: TextModel) -> None:
    """Give every softmax of the model a :class:`StaticCache`."""
    for attention in _attentions(model):
        old = attention.mechanism
        if type(old) is Softmax:
            attention.mechanism = CachedSoftmax(
                old.num_heads, old.head_dim, scale=old.scale, num_kv_heads=old.num_kv_heads, causal=True
            )


def empty_states(model: TextModel, batch: int, room: int) -> list[BlockState | None]:
    """States before the first token; caches get ``room`` slots."""
    states: list[BlockState | None] = []
    for attention in _attentions(model):
        own = attention.mechanism
        if isinstance(own, CachedSoftmax):
            keys, values = model.embedding.weight.new_empty(2, batch, own.num_kv_heads, room, own.head_dim).unbind()
            states.append(BlockState(StaticCache(keys, values, 0)))
        else:
            states.append(None)
    return states


def spread(state: BlockState, batch: int, room: int) -> BlockState:
    """Copy the state of one sequence for a batch of them; a cache gets ``room`` free slots."""
    cache = state.mechanism
    if not isinstance(cache, StaticCache):
        own: BlockState = tree_map_only(Tensor, lambda x: x.expand(batch, *x.shape[1:]).clone(), state)
        return own
    filled = []
    for old in (cache.keys, cache.values):
        new = old.new_empty(batch, old.shape[1], cache.length + room, old.shape[3])
        new[:, :, : cache.length] = old[:, :, : cache.length]
        filled.append(new)
    return state._replace(mechanism=StaticCache(filled[0], filled[1], cache.length))


def state_bytes(states: list[BlockState]) -> int:
    """Bytes of the states; free slots of a cache do not count."""
    total = 0
    for state in states:
        cache = state.mechanism
        if isinstance(cache, StaticCache):
            total += 2 * cache.keys[:, :, : cache.length].numel() * cache.keys.element_size()
        else:
            total += sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))
    return total


def overwrite(states: list[BlockState], new: list[BlockState]) -> None:
    """Copy new states into the memory of old ones; a cache was written in place and stays."""
    both = zip(tree_leaves(states), tree_leaves(new), strict=True)
    pairs = [(a, b) for a, b in both if isinstance(a, Tensor) and a is not b]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def any_softmax() -> AbstractContextManager[object]:
    """Allow PyTorch's flash kernel or the next that serves; not cuDNN's, which builds a plan for every new length."""
    return sdpa_kernel(ANY_SOFTMAX, set_priority=True)


class Prefix:
    """The states of one sequence ``text (tokens,)`` after a context, read in pieces, from context to context."""

    def __init__(self, model: TextModel, text: Tensor, piece: int) -> None:
        self.model, self.text, self.piece = model, text, piece
        self.length, self.seconds = 0, 0.0
        self._states: list[BlockState] | None = None

    @torch.no_grad()
    def reach(self, context: int) -> list[BlockState]:
        """States after the first ``context`` tokens; ``seconds`` is the time since the context before this one."""
        if context < self.length:
            self.length, self._states = 0, None
        begin, device = time.perf_counter(), self.text.device
        while self.length < context:
            states = self._states or empty_states(self.model, 1, len(self.text))
            end = min(self.length + self.piece, context)
            positions = torch.arange(self.length, end, device=device).unsqueeze(0)
            with any_softmax():
                _, self._states = self.model.extend(self.text[None, self.length : end], states, positions)
            self.length = end
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds = time.perf_counter() - begin
        assert self._states is not None
        return self._states


class Decoder:
    """A batch of sequences whose step reads one token of each, and updates next tokens, states and position.

    ``prefix``: the states of one sequence, from which every sequence of the batch starts. ``static`` keeps the states
    in the same memory, as a graph needs it. A cache then reads and writes the same slots at every step: the step is
    always the one right after the context.
    """

    def __init__(self, model: TextModel, prefix: list[BlockState], length: int, batch: int, room: int, static: bool):
        self.model, self.prefix, self.length, self.static = model, prefix, length, static
        device = model.embedding.weight.device
        self.states = [spread(state, batch, room) for state in prefix]
        self._start = list(self.states)
        self.position = torch.full((1, 1), length, device=device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.logits = torch.empty(0)
        has_cache = any(isinstance(state.mechanism, StaticCache) for state in prefix)
        self.steps_follow = not (static and has_cache)
        """Whether a step continues the one before it, which those of a graph with a cache do not."""
        self._replay: Callable[[], None] | None = None

    def step(self) -> None:
        (self._replay or self._step)()

    def restart(self) -> None:
        """Return to the position after the context."""
        self.position.fill_(self.length)
        self.states = list(self._start)
        if self.static and self.steps_follow:
            overwrite(self.states, [spread(state, len(self.tokens), 0) for state in self.prefix])

    def capture(self) -> None:
        """Turn the step into replays of a CUDA graph, if it does nothing that a graph cannot hold."""
        self._replay = capture(self._step)

    @property
    def captured(self) -> bool:
        return self._replay is not None

    def read(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, n, vocabulary)`` of ``tokens (n,)``, read one by one by every sequence."""
        found = []
        for token in tokens:
            self.tokens.copy_(token)
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found, dim=1)

    @torch.no_grad()
    def _step(self) -> None:
        with any_softmax():
            x, new = self.model.extend(self.tokens, self.states, self.position)
        self.logits = self.model.logits(x[:, -1])
        if self.static:
            overwrite(self.states, new)
        else:
            self.states = new
        self.position += 1
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))


class DecodingTruth:
    """Checks a decoding step: its logits against those of the whole prefix at once, in higher precision.

    ``err <= 2 (err(plain) + eps)``: plain is the whole prefix at once in the precision that is measured, and errors are
    norms of differences over the norm of the exact values, which are in fp64 on a CPU and in fp32 on a GPU.

    Softmax in fp32 has no fast kernel, and would take minutes for a long context. Beyond ``exact_up_to`` tokens its
    step is compared to plain itself. If the step is within its budget of the exact values, and plain within its error,
    the two differ by no more than the sum; plain's error is that at the longest context with exact values, which a
    process that begins beyond it measures first.
    """

    def __init__(self, model: TextModel, text: Tensor, exact_up_to: int | None) -> None:
        self.model, self.text = model, text
        self.exact_up_to = len(text) if exact_up_to is None else exact_up_to
        self.on_cpu = text.device.type == "cpu"
        self.exact_model = deepcopy(model).to(torch.float64 if self.on_cpu else torch.float32)
        self._known: dict[int, tuple[Tensor, float, str]] = {}

    def check(self, found: Tensor, context: int) -> Verdict:
        """Check ``found (B, n, vocabulary)``: logits of the n tokens after the context, in equal sequences."""
        reference, budget, against = self._truth(context)
        errors = distances(found, reference[: found.shape[1]])
        worst = int(errors.nan_to_num(nan=torch.inf).argmax())
        error = errors[worst].item()
        return Verdict(error <= budget, f"logits of sequence {worst}", error, budget, against)

    def _truth(self, context: int) -> tuple[Tensor, float, str]:
        if context not in self._known:
            plain = self.logits(self.model, context)
            eps = torch.finfo(self.model.embedding.weight.dtype).eps
            if context <= self.exact_up_to:
                exact = self.logits(self.exact_model, context)
                against = f"{'fp64' if self.on_cpu else 'fp32'}, {context} tokens at once"
                self._known[context] = exact, 2 * (distances(plain[None], exact).item() + eps), against
            else:
                exact_at = max((known for known in self._known if known <= self.exact_up_to), default=self.exact_up_to)
                allowed = self._truth(exact_at)[1]
                against = f"{context} tokens at once in the same precision"
                self._known[context] = plain, 1.5 * allowed - eps, against
        return self._known[context]

    @torch.no_grad()
    def logits(self, model: TextModel, context: int) -> Tensor:
        """Logits of the last tokens alone, ``(n, vocabulary)``."""
        with any_softmax():
            x = model.hidden(self.text[None, : context + CHECKED_TOKENS])
        return model.logits(x[0, -CHECKED_TOKENS:])


def distances(found: Tensor, exact: Tensor) -> Tensor:
    """Relative distances of each ``found (B, n, vocabulary)`` from ``exact (n, vocabulary)``."""
    apart = torch.linalg.vector_norm(found.to(exact.dtype) - exact, dim=(1, 2))
    return apart / torch.linalg.vector_norm(exact)
