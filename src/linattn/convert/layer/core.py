"""Cores, which replace softmax: ``(q, k, v) -> output``, all at once, in pieces or token by token."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.layer.features import FeaturePair, HedgehogMap, NPMap, RandomFeatures, SeparateMaps, T2RMap
from linattn.convert.plan import LayerPlan, LayerShape
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.hybrid.api import hybrid_attention, hybrid_attention_with_state
from linattn.ops.hybrid.decoding import DecodingState, Setting, begin, usable, whole
from linattn.ops.hybrid.decoding_step import hybrid_attention_decode
from linattn.ops.hybrid.types import HybridState, SalientBudget, Window
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.call import autocast_dtype, hide

OPEN_GATE = 4.0  # sigmoid(4) = 0.98
EPS = 1e-6
SMALLEST_EPS = 1e-30  # for exponential features: even very small sums of them are meaningful


class Core(nn.Module, ABC):
    """The part of a converted attention between its projections.

    Takes q ``(B, H, T, D)``, scaled for the logits ``q . k / sqrt(D)``, k and v ``(B, H_kv, T, D)``, the layer's input
    x ``(B, T, hidden)`` and key_mask ``(B, T)``; the output is ``(B, H, T, D)`` in the dtype of v.

    Two switches are for ablations: ``zero_linear`` gives the linear part the weight 0, with ``zero_salient`` no tokens
    are chosen.
    """

    zero_linear: bool = False
    zero_salient: bool = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        return self.attend(q, k, v, x, key_mask, None, False)[0]

    def with_state(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: Any = None,
        x: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The output after ``state`` (None: empty), and the next state; for prefill, also in pieces."""
        return self.attend(q, k, v, x, key_mask, state, True)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, x: Tensor | None = None) -> tuple[Tensor, Any]:
        """Decode one token of each sequence, q, k and v ``(B, heads, 1, D)``, x ``(B, 1, hidden)``.

        Works like :meth:`with_state`, but takes ownership of the state: it may be overwritten, and the one that is
        returned may have another layout, which only this method takes.
        """
        return self.attend(q, k, v, x, None, state, True)

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, key_mask: Tensor | None, state: Any, need_state: bool
    ) -> tuple[Tensor, Any]:
        """The computation behind all other methods; the state may be None unless ``need_state``."""


class HybridCore(Core):
    """Exact attention over a window and chosen tokens, linear over the rest, with one denominator for both.

    Without a window it is all linear. ``features`` are the maps of the linear part (None: no linear part),
    ``log_weight (H,)`` is the logarithm of its learned factor, ``gate_map`` the gate on its numerator.
    """

    def __init__(self, plan: LayerPlan, shape: LayerShape) -> None:
        super().__init__()
        if plan.window and not shape.causal:
            raise ValueError("a window of past tokens needs a causal layer; this one is bidirectional: use window=0")
        self.plan, self.shape = plan, shape
        self.features = build_features(plan, shape)
        weight, H = plan.linear_weight, shape.num_heads
        self.log_weight = None if weight is None else nn.Parameter(torch.full((H,), math.log(weight)))
        self.gate_map = nn.Linear(shape.hidden, H * shape.head_dim) if plan.gate else None
        if self.gate_map is not None:
            nn.init.zeros_(self.gate_map.weight)
            nn.init.constant_(self.gate_map.bias, OPEN_GATE)

    @property
    def linear_only(self) -> bool:
        """Whether no key is exact: the core is then a linear attention, which has kernels of its own."""
        return self.plan.window == 0

    @property
    def budget(self) -> SalientBudget | None:
        return None if self.zero_salient else self.plan.budget

    def feature_pair(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features of queries, times their weight, and of keys; None if there is no linear part."""
        if self.features is None:
            return None
        phi, psi = self.features(q, k)
        if self.log_weight is not None:
            phi = phi * self.log_weight.to(phi.dtype).exp()[:, None, None]
        if self.zero_linear:
            phi = torch.zeros_like(phi)
        return phi, psi

    def gate(self, x: Tensor | None) -> Tensor | None:
        """``sigmoid(W x + b) (B, H, T, D)``; None without a gate."""
        if self.gate_map is None:
            return None
        if x is None:
            raise ValueError("the gate is made of x, the layer's input (B, T, hidden), but x is None")
        logits = self.gate_map(x.to(self.gate_map.weight.dtype))
        return logits.unflatten(2, (self.shape.num_heads, -1)).transpose(1, 2).sigmoid()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, key_mask: Tensor | None, state: Any, need_state: bool
    ) -> tuple[Tensor, Any]:
        q, k, x = wiped(q, k, x, key_mask)
        pair, gate = self.feature_pair(q, k), self.gate(x)
        if self.linear_only:
            assert pair is not None
            return self._linear(*pair, v, gate, key_mask, state, need_state)
        features = None if pair is None else (pair[0].to(q.dtype), pair[1].to(k.dtype))
        options: dict[str, Any] = {
            "features": features, "window": self.plan.window, "layout": self.plan.layout, "delay": self.plan.delay,
            "budget": self.budget, "gate": None if gate is None else gate.to(q.dtype), "units": self.plan.units,
            "key_mask": key_mask,
        }  # fmt: skip
        if not need_state:
            return hybrid_attention(q, k, v, **options), None
        return hybrid_attention_with_state(q, k, v, initial_state=state, **options)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, x: Tensor | None = None) -> tuple[Tensor, Any]:
        ready = self._ready(q, k, v, state)
        if ready is None:
            return self.attend(q, k, v, x, None, whole(state) if isinstance(state, DecodingState) else state, True)
        pair, gate = self.feature_pair(q, k), self.gate(x)
        features = None if pair is None else (pair[0].to(q.dtype), pair[1].to(k.dtype))
        gate = None if gate is None else gate.to(q.dtype)
        return hybrid_attention_decode(q, k, v, ready, features=features, gate=gate, units=self.plan.units)

    def _ready(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> DecodingState | None:
        """The state in the layout for decoding; None where that does not apply."""
        one_dtype = q.dtype == k.dtype == v.dtype and autocast_dtype(q) is None
        if self.linear_only or state is None or not one_dtype or not usable(q):
            return None
        window = Window(self.plan.window, self.plan.layout, self.plan.delay)
        setting = Setting(window, self.budget, self.shape.head_dim**-0.5)
        if isinstance(state, HybridState) and state.window.k.dtype == k.dtype:
            state = begin(state, setting, q.shape[1] // k.shape[1])
        return state.here() if isinstance(state, DecodingState) and state.serves(setting, k) else None

    def _linear(
        self,
        phi: Tensor,
        psi: Tensor,
        v: Tensor,
        gate: Tensor | None,
        key_mask: Tensor | None,
        state: Any,
        need_state: bool,
    ) -> tuple[Tensor, Any]:
        exponential = self.plan.features == "prf"
        values = v.to(phi.dtype) if exponential else v  # bounded features may be in 16 bits, exponentials may not
        phi, psi = phi.to(values.dtype), psi.to(values.dtype)
        options: dict[str, Any] = {"causal": self.shape.causal, "key_mask": key_mask}
        options["eps"] = SMALLEST_EPS if exponential else EPS
        if need_state:
            out, state = linear_attention_with_state(phi, psi, values, initial_state=state, **options)
        else:
            out = linear_attention(phi, psi, values, **options)
        return (out if gate is None else out * gate).to(v.dtype), state

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.plan.to_dict().items())


class MechanismCore(Core):
    """A registered mechanism, computed in the dtype of its parameters."""

    def __init__(self, plan: LayerPlan, shape: LayerShape) -> None:
        super().__init__()
        assert plan.mechanism is not None
        self.plan, self.shape = plan, shape
        self.mechanism = create_mechanism(
            plan.mechanism, num_heads=shape.num_heads, head_dim=shape.head_dim, num_kv_heads=shape.num_kv_heads,
            causal=shape.causal, input_dim=shape.hidden, **plan.options,
        )  # fmt: skip

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, key_mask: Tensor | None, state: Any, need_state: bool
    ) -> tuple[Tensor, Any]:
        dtype = next((p.dtype for p in self.mechanism.parameters()), v.dtype)
        out_dtype, (q, k, v) = v.dtype, (tensor.to(dtype) for tensor in (q, k, v))
        x = None if x is None else x.to(dtype)
        q, k, x = wiped(q, k, x, key_mask)
        if not need_state:
            out = self.mechanism(q, k, v, x=x, key_mask=key_mask)
        elif k.shape[2] == 1 and key_mask is None:
            step = self.mechanism.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state, x=None if x is None else x[:, 0])
            out, state = step.output.unsqueeze(2), step.state
        else:
            out, state = self.mechanism.with_state(q, k, v, state=state, x=x, key_mask=key_mask)
        return (torch.zeros_like(out) if self.zero_linear else out).to(out_dtype), state


def wiped(q: Tensor, k: Tensor, x: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Replace padding by zeros: it may hold anything, which would reach the gradients of learned maps."""
    if key_mask is None or x is None:
        return hide(q, key_mask), hide(k, key_mask), x
    return hide(q, key_mask), hide(k, key_mask), x.masked_fill(~key_mask.unsqueeze(-1), 0)


def build_core(plan: LayerPlan, shape: LayerShape) -> Core:
    """The core of one layer, in fp32: its few parameters are learned, even in a model of 16 bits."""
    return MechanismCore(plan, shape) if plan.kind == "mechanism" else HybridCore(plan, shape)


def build_features(plan: LayerPlan, shape: LayerShape) -> FeaturePair | None:
    """The feature maps of a hybrid layer; None if it has no linear part."""
    D, heads = shape.head_dim, (shape.num_heads, shape.num_kv_heads)
    width = D if plan.feature_dim is None else plan.feature_dim
    if plan.features == "none":
        return None
    if plan.features == "prf":
        return RandomFeatures(shape.num_kv_heads, D, width, relative=plan.window == 0)
    if plan.features == "np":
        return SeparateMaps(*(NPMap(n, D, width, householder=plan.householder) for n in heads))
    kind = HedgehogMap if plan.features == "hedgehog" else T2RMap
    return SeparateMaps(*(kind(n, D, width) for n in heads))
