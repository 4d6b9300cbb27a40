"""Cores, which replace softmax: ``(q, k, v) -> output``, all at once, in pieces or token by token; and their features.

Features of the linear part are ``(B, H, T, D) -> (B, H, T, F)``, per head, non-negative, computed in fp32. Queries and
keys have separate maps, except with random features, which approximate a single kernel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.convert.degrees.kernel import PositiveFeatures, log_features, scaled
from linattn.convert.plan import LayerPlan, LayerShape
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.hybrid.api import hybrid_attention, hybrid_attention_with_state
from linattn.ops.hybrid.decoding import DecodingState, Setting, begin, usable, whole
from linattn.ops.hybrid.decoding_step import hybrid_attention_decode
from linattn.ops.hybrid.types import HybridState, SalientBudget, Window
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.call import autocast_dtype, compute_dtype, hide, without_autocast

OPEN_GATE = 4.0  # sigmoid(4) = 0.98
EPS = 1e-6
SMALLEST_EPS = 1e-30  # for exponential features: even very small sums of them are meaningful
LARGEST_EXPONENT = 40.0  # of each of two factors, so that their product stays finite in fp32


class HeadMap(nn.Module, ABC):
    """Base of the learned maps: weights ``W (H, D, F)``, uniform in ``+-D^-0.5`` as in a linear layer."""

    identity: Literal["", "square", "always"] = ""  # when W starts as the identity instead

    def __init__(self, num_heads: int, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, feature_dim))
        nn.init.uniform_(self.weight, -(head_dim**-0.5), head_dim**-0.5)
        if self.identity == "always" or (self.identity == "square" and head_dim == feature_dim):
            with torch.no_grad():  # the first columns pass the channels on
                width = min(head_dim, feature_dim)
                self.weight[..., :width] = torch.eye(head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x, *self.parameters())

    def features(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The features of x for any number of heads, whose learned tensors are given; never in 16 bits."""
        with without_autocast(x):
            x = x.to(compute_dtype(x))
            return self.mapped(x, *(each.to(x.dtype) for each in tensors))

    @abstractmethod
    def mapped(self, x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        """The features of x, with x and all tensors in one dtype."""


class NPMap(HeadMap):
    """Norm-preserving map of STILL: learns the direction, keeps the norm of the input.

    ``phi(x) = [softmax(u), softmax(-u)]``, ``u = |x| x W / |x W|``; W starts as the identity: u starts as x.
    """

    identity = "always"

    def mapped(self, x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        return both_signs(F.normalize(x @ weight, dim=-1) * torch.linalg.vector_norm(x, dim=-1, keepdim=True))


class HedgehogMap(HeadMap):
    """``phi(x) = [softmax(x W), softmax(-x W)]``; W starts as the identity if F = D, else uniform in ``+-D^-0.5``.

    LoLCATs' own start is closer to 0: its initialiser takes a tensor ``(H, D, F)`` to have ``D F`` inputs, so W is
    uniform in ``+-(6 / (D F))^0.5``: 0.027 for D = 128 and F = 64, where this map has 0.088.
    """

    identity = "square"

    def mapped(self, x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        return both_signs(x @ weight)


class T2RMap(HeadMap):
    """``phi(x) = relu(x W + b)``; b starts at 0."""

    def __init__(self, num_heads: int, head_dim: int, feature_dim: int) -> None:
        super().__init__(num_heads, head_dim, feature_dim)
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, feature_dim))

    def mapped(self, x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        return (x @ weight + more[0]).relu()


class SeparateMaps(nn.Module):
    """A map for the queries and another one for the keys."""

    def __init__(self, query_map: HeadMap, key_map: HeadMap) -> None:
        super().__init__()
        self.query_map, self.key_map = query_map, key_map

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] != 1 or q.dtype != k.dtype or _hooked(self.query_map) or _hooked(self.key_map):
            return self.query_map(q), self.key_map(k)
        # For one token the number of operations matters, not their size: the heads of q and k are mapped together.
        pairs = zip(self.query_map.parameters(), self.key_map.parameters(), strict=True)
        both = self.key_map.features(torch.cat([q, k], 1), *(torch.cat(pair) for pair in pairs))
        phi, psi = both.split([q.shape[1], k.shape[1]], 1)
        return phi, psi


def _hooked(module: nn.Module) -> bool:
    """Whether hooks wait for a call of the module itself, to watch it or to bring its offloaded weights."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


class RandomFeatures(nn.Module):
    """Positive random features of the kernel ``exp(q . k / sqrt(D))``, learned: one set for queries and keys.

    ``phi(x)_m = sqrt(alpha_m / M) exp(z_m . x / D^{1/4} - |x|^2 / (2 sqrt(D)))``

    ``z (H_kv, M, D)`` starts normal and ``log_alpha (H_kv, M)`` at 0. Query heads share the z of their key head.

    Softmax attention does not change when a constant c is subtracted from all keys, and features of short vectors
    vary less: ``center (H_kv, D)`` is this constant and ``log_unit (H_kv,)`` the logarithm of a unit of the keys'
    features, both 0 until they are measured. The queries' features compensate for both.

    Args:
        relative: divide the features of each query by the largest of them. Only for attention whose denominator has the
            same factor, so that it cancels, and never beside exact logits: there features need their true values, to be
            compared to ``e^s`` (``units="one"``). Keys always keep one unit, which a state could not change later.
    """

    center: Tensor
    log_unit: Tensor

    def __init__(self, num_kv_heads: int, head_dim: int, count: int, *, relative: bool = False) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(num_kv_heads, count, head_dim))
        self.log_alpha = nn.Parameter(torch.zeros(num_kv_heads, count))
        self.register_buffer("center", torch.zeros(num_kv_heads, head_dim))
        self.register_buffer("log_unit", torch.zeros(num_kv_heads))
        self.relative = relative

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``(B, H, T, D), (B, H_kv, T, D) -> (B, H, T, M), (B, H_kv, T, M)``."""
        with without_autocast(q):
            q, k = q.to(compute_dtype(q)).unflatten(1, (self.z.shape[0], -1)), k.to(compute_dtype(k))
            shift = torch.einsum("bghtd,gd->bght", q, self.center.to(q)) * q.shape[-1] ** -0.5
            of_q = self._logs(q) + (shift + self.log_unit.to(q)[:, None, None]).unsqueeze(-1)
            if self.relative:
                of_q = of_q - of_q.detach().amax(-1, keepdim=True)
            centred = k - self.center.to(k)[:, None]
            of_k = self._logs(centred.unsqueeze(2)).squeeze(2) - self.log_unit.to(k)[:, None, None]
            return of_q.clamp(max=LARGEST_EXPONENT).exp().flatten(1, 2), of_k.clamp(max=LARGEST_EXPONENT).exp()

    def _logs(self, x: Tensor) -> Tensor:
        """Logarithms of the features of x ``(B, H_kv, G, T, D)``."""
        return log_features(scaled(x), PositiveFeatures(self.z.unsqueeze(1), self.log_alpha.unsqueeze(1)))


def both_signs(u: Tensor) -> Tensor:
    """``[softmax(u), softmax(-u)]``."""
    return torch.stack([u, -u], -2).softmax(-1).flatten(-2)


def build_features(plan: LayerPlan, shape: LayerShape) -> SeparateMaps | RandomFeatures | None:
    """The feature maps of a hybrid layer; None if it has no linear part."""
    D, heads = shape.head_dim, (shape.num_heads, shape.num_kv_heads)
    width = D if plan.feature_dim is None else plan.feature_dim
    if plan.features == "none":
        return None
    if plan.features == "prf":
        return RandomFeatures(shape.num_kv_heads, D, width, relative=plan.window == 0)
    kinds: dict[str, Callable[[int, int, int], HeadMap]] = {"np": NPMap, "hedgehog": HedgehogMap, "t2r": T2RMap}
    return SeparateMaps(*(kinds[plan.features](n, D, width) for n in heads))


class Core(nn.Module, ABC):
    """The part of a converted attention between its projections.

    Takes q ``(B, H, T, D)``, scaled for the logits ``q . k / sqrt(D)``, k and v ``(B, H_kv, T, D)``, the layer's input
    x ``(B, T, hidden)`` and key_mask ``(B, T)``; the output is ``(B, H, T, D)`` in the dtype of v.
    """

    def __init__(self, plan: LayerPlan, shape: LayerShape) -> None:
        super().__init__()
        self.plan, self.shape = plan, shape

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

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.plan.to_dict().items())


class HybridCore(Core):
    """Exact attention over a window and chosen tokens, linear over the rest, with one denominator for both.

    Without a window it is all linear. ``features`` are the maps of the linear part (None: no linear part),
    ``log_weight (H,)`` is the logarithm of its learned factor, ``gate_map`` the gate on its numerator. For ablations
    ``zero_linear`` gives the linear part the weight 0, and with ``zero_salient`` no tokens are chosen.
    """

    zero_linear: bool = False
    zero_salient: bool = False

    def __init__(self, plan: LayerPlan, shape: LayerShape) -> None:
        super().__init__(plan, shape)
        if plan.window and not shape.causal:
            raise ValueError("a window of past tokens needs a causal layer; this one is bidirectional: use window=0")
        self.features = build_features(plan, shape)
        weight, H = plan.linear_weight, shape.num_heads
        self.log_weight = None if weight is None else nn.Parameter(torch.full((H,), math.log(weight)))
        self.gate_map = nn.Linear(shape.hidden, H * shape.head_dim) if plan.gate else None
        if self.gate_map is not None:
            nn.init.zeros_(self.gate_map.weight)
            nn.init.constant_(self.gate_map.bias, OPEN_GATE)

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
        return (torch.zeros_like(phi) if self.zero_linear else phi), psi

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
        if self.plan.window == 0:  # no key is exact: linear attention has kernels of its own
            assert pair is not None
            exponential = self.plan.features == "prf"
            values = v.to(pair[0].dtype) if exponential else v  # bounded features may be in 16 bits, exponentials not
            linear = (pair[0].to(values.dtype), pair[1].to(values.dtype), values)
            options: dict[str, Any] = {"causal": self.shape.causal, "key_mask": key_mask}
            options["eps"] = SMALLEST_EPS if exponential else EPS
            if need_state:
                out, state = linear_attention_with_state(*linear, initial_state=state, **options)
            else:
                out = linear_attention(*linear, **options)
            return (out if gate is None else out * gate).to(v.dtype), state
        options = {
            "features": None if pair is None else (pair[0].to(q.dtype), pair[1].to(k.dtype)),
            "window": self.plan.window, "layout": self.plan.layout, "delay": self.plan.delay, "budget": self.budget,
            "gate": None if gate is None else gate.to(q.dtype), "units": self.plan.units, "key_mask": key_mask,
        }  # fmt: skip
        if not need_state:
            return hybrid_attention(q, k, v, **options), None
        return hybrid_attention_with_state(q, k, v, initial_state=state, **options)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, x: Tensor | None = None) -> tuple[Tensor, Any]:
        # The layout for decoding is for one token in one dtype, beside a window in chunks.
        one_dtype = q.dtype == k.dtype == v.dtype and autocast_dtype(q) is None
        ready: Any = None
        if self.plan.window and one_dtype and usable(q):
            window = Window(self.plan.window, self.plan.layout, self.plan.delay)
            setting, ready = Setting(window, self.budget, self.shape.head_dim**-0.5), state
            if isinstance(state, HybridState) and state.window.k.dtype == k.dtype:
                ready = begin(state, setting, q.shape[1] // k.shape[1])
            ready = ready.here() if isinstance(ready, DecodingState) and ready.serves(setting, k) else None
        if ready is None:
            return self.attend(q, k, v, x, None, whole(state) if isinstance(state, DecodingState) else state, True)
        pair, gate = self.feature_pair(q, k), self.gate(x)
        features = None if pair is None else (pair[0].to(q.dtype), pair[1].to(k.dtype))
        gate = None if gate is None else gate.to(q.dtype)
        return hybrid_attention_decode(q, k, v, ready, features=features, gate=gate, units=self.plan.units)


class MechanismCore(Core):
    """A registered mechanism, computed in the dtype of its parameters."""

    def __init__(self, plan: LayerPlan, shape: LayerShape) -> None:
        super().__init__(plan, shape)
        self.mechanism = create_mechanism(
            str(plan.mechanism), num_heads=shape.num_heads, head_dim=shape.head_dim, num_kv_heads=shape.num_kv_heads,
            causal=shape.causal, input_dim=shape.hidden, **plan.options,
        )  # fmt: skip

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, key_mask: Tensor | None, state: Any, need_state: bool
    ) -> tuple[Tensor, Any]:
        dtype = next((p.dtype for p in self.mechanism.parameters()), v.dtype)
        out_dtype, (q, k, v) = v.dtype, (tensor.to(dtype) for tensor in (q, k, v))
        q, k, x = wiped(q, k, None if x is None else x.to(dtype), key_mask)
        if not need_state:
            out = self.mechanism(q, k, v, x=x, key_mask=key_mask)
        elif k.shape[2] == 1 and key_mask is None:
            step = self.mechanism.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state, x=None if x is None else x[:, 0])
            out, state = step.output.unsqueeze(2), step.state
        else:
            out, state = self.mechanism.with_state(q, k, v, state=state, x=x, key_mask=key_mask)
        return out.to(out_dtype), state


def wiped(q: Tensor, k: Tensor, x: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Replace padding by zeros: it may hold anything, which would reach the gradients of learned maps."""
    if key_mask is not None and x is not None:
        x = x.masked_fill(~key_mask.unsqueeze(-1), 0)
    return hide(q, key_mask), hide(k, key_mask), x


def build_core(plan: LayerPlan, shape: LayerShape) -> Core:
    """The core of one layer, in fp32: its few parameters are learned, even in a model of 16 bits."""
    return MechanismCore(plan, shape) if plan.kind == "mechanism" else HybridCore(plan, shape)
