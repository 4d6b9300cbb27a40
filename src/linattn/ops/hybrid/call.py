"""The arguments of one call of hybrid attention, checked together before any work is done."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from linattn.ops.hybrid.types import LAYOUTS, UNITS, HybridState, Layout, SalientBudget, Units, Window
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import num_sequences
from linattn.ops.shared.types import LinearState

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 64


@dataclass(frozen=True)
class HybridCall:
    """The arguments of ``hybrid_attention``, and a state."""

    q: Tensor
    k: Tensor
    v: Tensor
    features: tuple[Tensor, Tensor] | None = None
    window: int = 64
    layout: Layout = "sliding"
    delay: int = 1
    budget: SalientBudget | None = None
    scores: Tensor | None = None
    gate: Tensor | None = None
    scale: float | None = None
    units: Units = "row_max"
    eps: float = 1e-6
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    validate: bool | None = None
    initial_state: HybridState | None = None
    need_state: bool = False

    @property
    def is_step(self) -> bool:
        """Whether the call is one token of decoding."""
        return self.k.shape[2] == 1 and self.cu_seqlens is None and self.need_state

    @property
    def spans(self) -> Window:
        return Window(self.window, self.layout, self.delay)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of rows: as in the window or the budget if these have chunks, else a size that is fast."""
        if self.layout == "chunks" and self.window:
            return self.window
        if self.budget is not None:
            return self.budget.chunk
        return min(max(self.window, SHORTEST_CHUNK), LONGEST_CHUNK)

    @property
    def ring_size(self) -> int:
        return self.spans.ring_size(self.budget)

    @property
    def logit_scale(self) -> float:
        return self.q.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def feature_pair(self) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, of width 0 if there are none."""
        return (self.q[..., :0], self.k[..., :0]) if self.features is None else self.features

    def check(self) -> None:
        """Raise TypeError or ValueError that names the argument and what is allowed."""
        checks.check_qkv(self.q, self.k, self.v)
        q, (B, H_kv, T, _) = self.q, self.k.shape
        if self.gate is not None:
            checks.check_input("gate", self.gate, "(B, H, T, V)", (*q.shape[:3], self.v.shape[3]), q)
            checks.check_same("q", q, gate=self.gate)
        if self.features is not None:
            self._check_features(self.features)
        checks.check_choice("layout", self.layout, LAYOUTS)
        checks.check_choice("units", self.units, UNITS)
        checks.check_integer("window", self.window, least=0)
        checks.check_integer("delay", self.delay, least=0)
        checks.check_scale(self.scale)
        checks.check_number("eps", self.eps, least=0)
        values = checks.check_layout(self.key_mask, self.cu_seqlens, B, T, q, self.validate)
        if self.scores is not None:
            if self.budget is None:
                raise ValueError("scores need a budget, which says how many of the best tokens are chosen")
            checks.check_input("scores", self.scores, "(B, H_kv, T)", (B, H_kv, T), q)
            real = self.scores if self.key_mask is None else self.scores.masked_fill(~self.key_mask[:, None], 0)
            if values and bool(real.isnan().any()):
                raise ValueError("scores must not be NaN at real tokens")
        if self.budget is not None:
            self._check_budget(self.budget)
        checks.check_state(self.initial_state, HybridState, {}, q)
        if self.initial_state is not None:
            self._check_state(self.initial_state)

    def _check_features(self, features: object) -> None:
        if not isinstance(features, tuple) or len(features) != 2:
            raise TypeError("features must be a pair (of the queries, of the keys) or None")
        for name, x, like in (("features[0]", features[0], self.q), ("features[1]", features[1], self.k)):
            checks.check_tensor(name, x, "(B, heads, T, F)", 4)
            checks.check_shape(name, x, (*like.shape[:3], features[1].shape[-1]))
            checks.check_same("q", self.q, **{name: x})

    def _check_budget(self, budget: object) -> None:
        if not isinstance(budget, SalientBudget):
            raise TypeError(f"budget must be a SalientBudget or None, got {type(budget).__name__}")
        if self.layout == "chunks" and budget.chunk != self.window:
            raise ValueError(f"budget.chunk ({budget.chunk}) must be the window's chunk ({self.window})")
        if budget.chunk > self.window:
            raise ValueError(
                f"budget.chunk ({budget.chunk}) must be at most window ({self.window}): a sliding window lets go of "
                "tokens before a longer chunk is complete"
            )

    def _check_state(self, state: HybridState) -> None:
        if (state.salient is None) != (self.budget is None):
            given = "chosen tokens" if self.budget is None else "none"
            raise ValueError(f"budget must be that of the calls before, got {self.budget} and a state with {given}")
        n, H_kv = num_sequences(self.k, self.cu_seqlens), self.k.shape[1]
        cap = None if self.budget is None else self.budget.cap
        K, V, Fs = (x.shape[3] for x in (self.k, self.v, self.feature_pair[1]))
        shapes: dict[str, tuple[int, ...]] = {
            "length": (n,), "linear.kv": (n, H_kv, Fs, V), "linear.k": (n, H_kv, Fs),
        }  # fmt: skip
        parts: list[tuple[str, Any, int, int]] = [("window", state.window, self.ring_size, Fs)]
        if state.salient is not None:  # without a cap nothing leaves the cache, so features are not kept
            kept = (state.salient.k.shape[2], 0) if cap is None else (cap, Fs)
            parts.append(("salient", state.salient, *kept))
        for part, tensors, count, width in parts:
            widths = {"k": (K,), "v": (V,), "features": (width,)}
            shapes |= {f"{part}.{name}": (n, H_kv, count, *widths.get(name, ())) for name in tensors._fields}
        for name, shape in shapes.items():
            x = attrgetter(name)(state)
            checks.check_shape(f"initial_state.{name}", x, shape)
            checks.check_device(f"initial_state.{name}", x, self.q)

    def initial_sums(self, dtype: torch.dtype) -> LinearState:
        state = self.initial_state
        sums = checks.zero_state(self.feature_pair[1], self.v, None) if state is None else state.linear
        return LinearState(*(x.to(dtype) for x in sums))
