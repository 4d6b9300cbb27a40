"""The arguments of one call of hybrid attention, checked together before any work is done."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from linattn.ops.hybrid.types import (
    LAYOUTS,
    UNITS,
    HybridState,
    Layout,
    SalientBudget,
    Units,
    Window,
)
from linattn.ops.shared import checks
from linattn.ops.shared.call import num_sequences
from linattn.ops.shared.types import LinearState

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 64


class StepOptions(TypedDict, total=False):
    """The options of ``hybrid_attention`` that are the same for all tokens of a sequence."""

    window: int
    layout: Layout
    delay: int
    budget: SalientBudget | None
    scale: float | None
    units: Units
    eps: float
    validate: bool | None


class HybridOptions(StepOptions, total=False):
    """The keyword arguments of ``hybrid_attention``."""

    features: tuple[Tensor, Tensor] | None
    salient: Tensor | None
    scores: Tensor | None
    gate: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None


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
    salient: Tensor | None = None
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
    def chooses(self) -> bool:
        """Whether tokens are chosen in this call, or were before."""
        before = self.initial_state is not None and self.initial_state.salient is not None
        return self.salient is not None or self.budget is not None or before

    @property
    def scores_itself(self) -> bool:
        """Whether tokens are scored by how much they attend to themselves."""
        return self.budget is not None and self.scores is None

    @property
    def logit_scale(self) -> float:
        return self.q.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def feature_pair(self) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, of width 0 if there are none."""
        return (self.q[..., :0], self.k[..., :0]) if self.features is None else self.features

    def salient_mask(self) -> Tensor:
        """The named tokens as a mask ``(B, H_kv, T)`` bool, whether they were given as a mask or as indices."""
        if self.salient is None:
            return torch.zeros(self.k.shape[:3], dtype=torch.bool, device=self.k.device)
        if self.salient.dtype == torch.bool:
            return self.salient
        T = self.k.shape[2]
        places = torch.where(self.salient < 0, T, self.salient.long())  # -1 names none: one place beyond the last
        mask = torch.zeros(*self.k.shape[:2], T + 1, dtype=torch.bool, device=self.k.device)
        return mask.scatter(2, places, True)[..., :T]

    def check(self) -> None:
        """Raise TypeError or ValueError that names the argument and what is allowed."""
        checks.check_qkv(self.q, self.k, self.v)
        self._check_features()
        self._check_options()
        values = checks.check_values(self.q, self.validate)
        B, _, T, _ = self.k.shape
        checks.check_key_mask(self.key_mask, B, T, self.q)
        checks.check_cu_seqlens(self.cu_seqlens, B, T, self.q, values)
        self._check_choice(values)
        if self.initial_state is not None:
            self._check_state(self.initial_state)

    def _check_features(self) -> None:
        q, k, v = self.q, self.k, self.v
        checks.check_same("q", q, gate=self.gate)
        if self.gate is not None:
            checks.check_tensor("gate", self.gate, "(B, H, T, V)", 4)
            checks.check_shape("gate", self.gate, (*q.shape[:3], v.shape[3]))
        if self.features is None:
            return
        if not isinstance(self.features, tuple) or len(self.features) != 2:
            raise TypeError("features must be a pair (of the queries, of the keys) or None")
        for name, x, like in (("features[0]", self.features[0], q), ("features[1]", self.features[1], k)):
            checks.check_tensor(name, x, "(B, heads, T, F)", 4)
            checks.check_shape(name, x, (*like.shape[:3], self.features[1].shape[-1]))
            checks.check_same("q", q, **{name: x})

    def _check_options(self) -> None:
        checks.check_choice("layout", self.layout, LAYOUTS)
        checks.check_choice("units", self.units, UNITS)
        checks.check_integer("window", self.window, least=0)
        checks.check_integer("delay", self.delay, least=0)
        checks.check_scale(self.scale)
        checks.check_eps(self.eps)

    def _check_choice(self, values: bool) -> None:
        B, H_kv, T, _ = self.k.shape
        if self.salient is not None:
            self._check_salient(self.salient, values)
        if self.scores is not None:
            if self.budget is None:
                raise ValueError("scores need a budget, which says how many of the best tokens are chosen")
            checks.check_tensor("scores", self.scores, "(B, H_kv, T)", 3)
            checks.check_shape("scores", self.scores, (B, H_kv, T))
            checks.check_device("scores", self.scores, self.q)
            real = self.scores if self.key_mask is None else self.scores.masked_fill(~self.key_mask[:, None], 0)
            if values and bool(real.isnan().any()):
                raise ValueError("scores must not be NaN at real tokens")
        if self.budget is None:
            return
        if not isinstance(self.budget, SalientBudget):
            raise TypeError(f"budget must be a SalientBudget or None, got {type(self.budget).__name__}")
        if self.salient is not None:
            raise ValueError("salient and budget exclude one another: tokens are named, or chosen by their scores")
        if self.layout == "chunks" and self.budget.chunk != self.window:
            raise ValueError(f"budget.chunk ({self.budget.chunk}) must be the window's chunk ({self.window})")
        if self.layout == "sliding" and self.budget.chunk > self.window:
            raise ValueError(
                f"budget.chunk ({self.budget.chunk}) must be at most window ({self.window}): a sliding window lets "
                "go of tokens before a longer chunk is complete"
            )

    def _check_salient(self, salient: object, values: bool) -> None:
        B, H_kv, T, _ = self.k.shape
        if not isinstance(salient, Tensor) or salient.dtype not in (torch.bool, torch.int32, torch.int64):
            given = salient.dtype if isinstance(salient, Tensor) else type(salient).__name__
            raise TypeError(f"salient must be a bool tensor (B, H_kv, T), or int32 or int64 indices, got {given}")
        if salient.dtype == torch.bool:
            checks.check_shape("salient", salient, (B, H_kv, T))
        else:
            checks.check_shape("salient", salient, (B, H_kv, salient.shape[-1]))
            if values and bool(((salient < -1) | (salient >= T)).any()):
                raise ValueError(f"salient must hold indices from 0 to T - 1 = {T - 1}, or -1 for none")
        checks.check_device("salient", salient, self.q)

    def _check_state(self, state: object) -> None:
        if not isinstance(state, HybridState):
            raise TypeError(f"initial_state must be a HybridState or None, got {type(state).__name__}")
        n, H_kv, R = num_sequences(self.k, self.cu_seqlens), self.k.shape[1], self.ring_size
        K, V, Fs = (x.shape[3] for x in (self.k, self.v, self.feature_pair[1]))
        shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [
            ("length", state.length, (n,)),
            ("linear.kv", state.linear.kv, (n, H_kv, Fs, V)),
            ("linear.k", state.linear.k, (n, H_kv, Fs)),
        ]
        widths = {"k": (K,), "v": (V,), "features": (Fs,)}
        for name, x in state.window._asdict().items():
            shapes.append((f"window.{name}", x, (n, H_kv, R, *widths.get(name, ()))))
        if state.salient is not None:
            cap = None if self.budget is None else self.budget.cap
            M = state.salient.k.shape[2] if cap is None else cap
            widths["features"] = (0 if cap is None else Fs,)  # without a cap nothing leaves the cache
            for name, x in state.salient._asdict().items():
                shapes.append((f"salient.{name}", x, (n, H_kv, M, *widths.get(name, ()))))
        for name, x, shape in shapes:
            checks.check_shape(f"initial_state.{name}", x, shape)
            checks.check_device(f"initial_state.{name}", x, self.q)

    def initial_sums(self, dtype: torch.dtype) -> LinearState:
        if self.initial_state is not None:
            return LinearState(*(x.to(dtype) for x in self.initial_state.linear))
        B, H_kv, _, Fs = self.feature_pair[1].shape
        kv = torch.zeros(B, H_kv, Fs, self.v.shape[3], dtype=dtype, device=self.k.device)
        return LinearState(kv, kv.new_zeros(B, H_kv, Fs))
