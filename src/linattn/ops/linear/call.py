"""The arguments of one call of linear attention: checked together before any work, then as the forms take them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.ops.maps import FeatureMap
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import num_sequences
from linattn.ops.shared.rotation import Rotate
from linattn.ops.shared.types import DECAY_INDICES, NORMALIZERS, STRONGEST_DECAY, DecayIndex, LinearState, Normalizer

FeatureMaps = FeatureMap | tuple[FeatureMap, FeatureMap] | None


@dataclass(frozen=True)
class LinearCall:
    """The arguments of ``linear_attention``, and further ones for callers inside the library.

    tf32: whether causal kernels may multiply fp32 features with 11 bits; sums stay fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    log_decay: Tensor | None = None
    normalizer: Normalizer = "sum"
    eps: float = 1e-6
    feature_map: FeatureMaps = None
    norm_features: tuple[Tensor, Tensor] | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    decay_index: DecayIndex | None = None
    validate: bool | None = None
    initial_state: LinearState | None = None
    need_state: bool = False
    log_input: Tensor | None = None
    rotate: Rotate | None = None
    tf32: bool = False

    @property
    def is_step(self) -> bool:
        """Whether the call is one token of decoding."""
        alone = self.key_mask is None and self.cu_seqlens is None
        return self.causal and self.need_state and alone and self.k.shape[2] == 1

    @property
    def maps(self) -> tuple[FeatureMap | None, FeatureMap | None]:
        """The feature maps of q and of k."""
        return self.feature_map if isinstance(self.feature_map, tuple) else (self.feature_map, self.feature_map)

    @property
    def flows(self) -> int:
        """How many virtual heads the maps make of each head."""
        return flows_of(self.maps[1])

    def num_features(self, side: int) -> int:
        """Width of the features of q (side 0) or k (side 1)."""
        width, feature_map = (self.q, self.k)[side].shape[3], self.maps[side]
        return width if feature_map is None else feature_map.num_features(width)

    def check(self) -> None:
        """Raise TypeError or ValueError that names the argument and what is allowed."""
        q, k = self.q, self.k
        checks.check_qkv(q, k, self.v, one_length=False, one_width=not isinstance(self.feature_map, tuple))
        checks.check_choice("normalizer", self.normalizer, NORMALIZERS)
        checks.check_choice("decay_index", self.decay_index, (*DECAY_INDICES, None))
        checks.check_flag("causal", self.causal)
        checks.check_number("eps", self.eps, least=0)
        if self.validate is not None:
            checks.check_flag("validate", self.validate)
        if self.rotate is not None and not callable(self.rotate):
            raise TypeError(f"rotate must be a function of the features of q and k, or None, got {self.rotate!r}")
        self._check_maps()
        B, H_kv, Tk, _ = k.shape
        values = checks.check_layout(self.key_mask, self.cu_seqlens, B, Tk, q, self.validate)
        if self.log_decay is not None:
            allowed = [(H_kv,), (B, H_kv, Tk), (B, H_kv, Tk, self.num_features(1))]
            checks.check_log_decay(self.log_decay, allowed, q, values)
        if self.log_input is not None:
            checks.check_input("log_input", self.log_input, "(B, H_kv, Tk)", (B, H_kv, Tk), q)
            checks.check_log_input(self.log_input, self.key_mask, values)
        for what, given in (
            ("causal=True", self.causal), ("a log_decay", self.log_decay is not None),
            ("cu_seqlens", self.cu_seqlens is not None),
        ):  # fmt: skip
            if given and q.shape[2] != Tk:
                raise ValueError(f"{what} needs as many queries as keys, got Tq = {q.shape[2]} and Tk = {Tk}")
        self._check_norm_features()
        self._check_state()

    def _check_maps(self) -> None:
        maps = self.maps
        if len(maps) != 2 or not all(m is None or isinstance(m, FeatureMap) for m in maps):
            raise TypeError(
                "feature_map must be a FeatureMap such as EluPlusOne(), a pair of them, or None, "
                f"got {self.feature_map!r}"
            )
        for what, of_q, of_k in (
            ("flows", flows_of(maps[0]), self.flows), ("features", self.num_features(0), self.num_features(1)),
        ):  # fmt: skip
            if of_q != of_k:
                raise ValueError(f"feature_map gives q {of_q} {what} and k {of_k}; they must be equal")
        if self.v.shape[3] % self.flows:
            raise ValueError(
                f"feature_map has {self.flows} flows, v {self.v.shape[3]} channels for them: not a multiple"
            )

    def _check_norm_features(self) -> None:
        if self.norm_features is None:
            return
        if not isinstance(self.norm_features, tuple) or len(self.norm_features) != 2:
            raise TypeError("norm_features must be a pair (q', k') of tensors shaped like q and k")
        if self.normalizer is None:
            raise ValueError("norm_features are for the denominator, but normalizer=None has none")
        if self.flows > 1:
            raise ValueError(f"norm_features serve one flow, but feature_map has {self.flows}")
        for name, x, like in zip(("q'", "k'"), self.norm_features, (self.q, self.k), strict=True):
            checks.check_tensor(f"norm_features {name}", x, "(B, H, T, K)", 4)
            per_channel = self.log_decay is not None and self.log_decay.ndim == 4
            features = (self.log_decay if per_channel else self.norm_features[0]).shape[-1]  # type: ignore[union-attr]
            checks.check_shape(f"norm_features {name}", x, (*like.shape[:3], features))
            checks.check_same("q", self.q, **{f"norm_features {name}": x})

    def _check_state(self) -> None:
        if self.need_state and not self.causal and self.log_decay is not None:
            raise ValueError(
                "a bidirectional log_decay has no state to hand over: use linear_attention, or causal=True"
            )
        if self.need_state and self.rotate is not None:
            raise ValueError("rotate counts positions from the first token given, so it does not go with a state")
        n, H_kv, features = num_sequences(self.k, self.cu_seqlens), self.k.shape[1] * self.flows, self.num_features(1)
        norm_width = features if self.norm_features is None else self.norm_features[1].shape[-1]
        shapes = {"kv": (n, H_kv, features, self.v.shape[3] // self.flows), "k": (n, H_kv, norm_width)}
        checks.check_state(self.initial_state, LinearState, shapes, self.q)


def flows_of(feature_map: FeatureMap | None) -> int:
    return 1 if feature_map is None else feature_map.flows


def map_features(q: Tensor, k: Tensor, feature_map: FeatureMaps) -> tuple[Tensor, Tensor]:
    """Features of q and k. Flows become virtual heads, and those of q are ordered by key head, flow and query head."""
    map_q, map_k = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    phi, psi = q if map_q is None else map_q(q), k if map_k is None else map_k(k)
    return order_queries(phi, flows_of(map_q), k.shape[1]), psi


def rotated(phi: Tensor, psi: Tensor, call: LinearCall) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """The numerator's features, rotated, and the denominator's features if they differ.

    Rotated features may be negative, and the sum of their products 0, so the denominator keeps those before.
    """
    if call.rotate is None:
        return phi, psi, call.norm_features
    norm_features = call.norm_features
    if norm_features is None and call.normalizer is not None:
        norm_features = phi, psi
    return *call.rotate(phi, psi), norm_features


def log_decay_for(log_decay: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Bound the decay away from -inf, and let masked tokens decay nothing."""
    if log_decay is None:
        return None
    log_decay = log_decay.clamp(min=STRONGEST_DECAY)
    if key_mask is None:
        return log_decay
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(-1, -1, key_mask.shape[1])
    padding = ~key_mask[:, None]
    return log_decay.masked_fill(padding if log_decay.ndim == 3 else padding.unsqueeze(-1), 0)


def log_input_for(log_input: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Set ``log_input`` to 0 at masked tokens, which may hold anything, NaN too."""
    return log_input if log_input is None or key_mask is None else log_input.masked_fill(~key_mask[:, None], 0)


def weigh(psi: Tensor, log_input: Tensor | None) -> Tensor:
    """Features ``(B, H_kv, T, K)`` times ``exp(log_input) (B, H_kv, T)``, rounded once."""
    if log_input is None:
        return psi
    weights = log_input.to(torch.promote_types(psi.dtype, torch.float32)).exp()
    return (psi.to(weights.dtype) * weights.unsqueeze(-1)).to(psi.dtype)


def normalize(numerator: Tensor, denominator: Tensor, normalizer: Normalizer, eps: float) -> Tensor:
    if normalizer is None:
        return numerator
    n = (denominator + eps if normalizer == "sum" else denominator.abs().clamp(min=1)).unsqueeze(-1)
    # The sums belong to this call alone: without a gradient they can be divided in place.
    in_place = not (numerator.requires_grad or torch.compiler.is_compiling())
    return numerator.div_(n) if in_place else numerator / n


# Flow f of a key head is a virtual head of its own with one share of v's channels.


def order_queries(phi: Tensor, flows: int, kv_heads: int) -> Tensor:
    """Put the queries of a virtual key head together: in ``(B, H flows, T, F)`` flow f of head h is ``h flows + f``."""
    return phi if flows == 1 else phi.unflatten(1, (kv_heads, -1, flows)).transpose(2, 3).flatten(1, 3)


def split_values(v: Tensor, flows: int) -> Tensor:
    """``(B, H_kv, T, V) -> (B, H_kv flows, T, V / flows)``."""
    return v if flows == 1 else v.unflatten(-1, (flows, -1)).movedim(-2, 2).flatten(1, 2)


def split_decay(log_decay: Tensor | None, flows: int) -> Tensor | None:
    """Decays ``(H_kv,)`` or ``(B, H_kv, ..)`` with every head repeated: all flows of a head decay alike."""
    if log_decay is None or flows == 1:
        return log_decay
    return log_decay.repeat_interleave(flows, dim=0 if log_decay.ndim == 1 else 1)


def join_outputs(output: Tensor, flows: int, kv_heads: int) -> Tensor:
    """Join ``(B, H flows, T, V / flows)``, in the order of ``order_queries``, to ``(B, H, T, V)``."""
    if flows == 1:
        return output
    return output.unflatten(1, (kv_heads, flows, -1)).movedim(2, -2).flatten(-2).flatten(1, 2)
