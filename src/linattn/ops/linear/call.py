"""The arguments of one call of linear attention, checked together before any work is done."""

import numbers
from dataclasses import dataclass

from torch import Tensor

from linattn.ops.maps import FeatureMap
from linattn.ops.shared import checks
from linattn.ops.shared.packing import num_sequences
from linattn.ops.shared.rotation import Rotate
from linattn.ops.shared.types import DECAY_INDICES, NORMALIZERS, DecayIndex, LinearState, Normalizer

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

    def check(self) -> None:
        """Raise TypeError or ValueError that names the argument and what is allowed."""
        self._check_shapes()
        self._check_options()
        values = checks.check_values(self.q, self.validate)
        B, H_kv, Tk, _ = self.k.shape
        if self.key_mask is not None:
            checks.check_key_mask(self.key_mask, B, Tk, self.q)
        if self.cu_seqlens is not None:
            checks.check_cu_seqlens(self.cu_seqlens, B, Tk, self.q, values)
        if self.log_decay is not None:
            features = self.num_features(1)
            allowed = [(H_kv,), (B, H_kv, Tk), (B, H_kv, Tk, features)]
            checks.check_log_decay(self.log_decay, allowed, self.q, values)
        self._check_log_input(values)
        self._check_equal_lengths()
        self._check_norm_features()
        self._check_state()

    def _check_shapes(self) -> None:
        q, k, v = self.q, self.k, self.v
        checks.check_tensor("q", q, "(B, H, Tq, K)", 4)
        checks.check_tensor("k", k, "(B, H_kv, Tk, K)", 4)
        checks.check_tensor("v", v, "(B, H_kv, Tk, V)", 4)
        checks.check_same("q", q, k=k, v=v)
        checks.check_size("k", "batch size", k.shape[0], q.shape[0], "q")
        checks.check_size("v", "batch size", v.shape[0], q.shape[0], "q")
        checks.check_size("v", "number of heads", v.shape[1], k.shape[1], "k")
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        checks.check_groups(q.shape[1], k.shape[1])
        if self.feature_map is None or not isinstance(self.feature_map, tuple):
            checks.check_size("k", "head dimension", k.shape[3], q.shape[3], "q")

    def _check_options(self) -> None:
        checks.check_choice("normalizer", self.normalizer, NORMALIZERS)
        checks.check_choice("decay_index", self.decay_index, (*DECAY_INDICES, None))
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal must be True or False, got {self.causal!r}")
        if not isinstance(self.eps, numbers.Real) or isinstance(self.eps, bool) or not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps must be a number >= 0, got {self.eps!r}")
        if self.validate is not None and not isinstance(self.validate, bool):
            raise TypeError(f"validate must be True, False or None, got {self.validate!r}")
        maps = self.maps
        if len(maps) != 2 or not all(m is None or isinstance(m, FeatureMap) for m in maps):
            raise TypeError(
                "feature_map must be a FeatureMap such as EluPlusOne(), a pair of them, or None, "
                f"got {self.feature_map!r}"
            )
        if self.rotate is not None and not callable(self.rotate):
            raise TypeError(f"rotate must be a function of the features of q and k, or None, got {self.rotate!r}")
        flows = [1 if m is None else m.flows for m in maps]
        if flows[0] != flows[1]:
            raise ValueError(f"feature_map gives q {flows[0]} flows and k {flows[1]}; they must be equal")
        if self.v.shape[3] % self.flows:
            raise ValueError(
                f"feature_map has {self.flows} flows, v {self.v.shape[3]} channels for them: not a multiple"
            )
        if self.num_features(0) != self.num_features(1):
            raise ValueError(
                f"feature_map gives q {self.num_features(0)} features and k {self.num_features(1)}; they must be equal"
            )

    def _check_log_input(self, values: bool) -> None:
        if self.log_input is None:
            return
        checks.check_tensor("log_input", self.log_input, "(B, H_kv, Tk)", 3)
        checks.check_shape("log_input", self.log_input, tuple(self.k.shape[:3]))
        checks.check_device("log_input", self.log_input, self.q)
        bad = ~(self.log_input < float("inf")) if values else None
        if bad is not None and bool((bad if self.key_mask is None else bad & self.key_mask[:, None]).any()):
            raise ValueError("log_input must be below +inf and not NaN at every real token")

    def _check_equal_lengths(self) -> None:
        Tq, Tk = self.q.shape[2], self.k.shape[2]
        if Tq == Tk:
            return
        for name, given in (
            ("causal=True", self.causal),
            ("a log_decay", self.log_decay is not None),
            ("cu_seqlens", self.cu_seqlens is not None),
        ):
            if given:
                raise ValueError(f"{name} needs as many queries as keys, got Tq = {Tq} and Tk = {Tk}")

    def _check_norm_features(self) -> None:
        if self.norm_features is None:
            return
        if not isinstance(self.norm_features, tuple) or len(self.norm_features) != 2:
            raise TypeError("norm_features must be a pair (q', k') of tensors shaped like q and k")
        if self.normalizer is None:
            raise ValueError("norm_features are for the denominator, but normalizer=None has none")
        if self.flows > 1:
            raise ValueError(f"norm_features serve one flow, but feature_map has {self.flows}")
        pairs = (("q'", self.norm_features[0], self.q), ("k'", self.norm_features[1], self.k))
        for name, x, _ in pairs:
            checks.check_tensor(f"norm_features {name}", x, "(B, H, T, K)", 4)
        if self.log_decay is not None and self.log_decay.ndim == 4:
            features = self.log_decay.shape[3]
        else:
            features = self.norm_features[0].shape[-1]
        for name, x, like in pairs:
            checks.check_shape(f"norm_features {name}", x, (*like.shape[:3], features))
            checks.check_same("q", self.q, **{f"norm_features {name}": x})

    def _check_state(self) -> None:
        if self.need_state and not self.causal and self.log_decay is not None:
            raise ValueError(
                "a bidirectional log_decay has no state to hand over: use linear_attention, or causal=True"
            )
        if self.initial_state is None:
            return
        if not isinstance(self.initial_state, LinearState):
            raise TypeError(f"initial_state must be a LinearState(kv, k), got {type(self.initial_state).__name__}")
        n, H_kv = num_sequences(self.k, self.cu_seqlens), self.k.shape[1] * self.flows
        kv, k = self.initial_state
        checks.check_tensor("initial_state.kv", kv, "(B, H_kv, K, V)", 4)
        checks.check_tensor("initial_state.k", k, "(B, H_kv, K)", 3)
        features = self.num_features(1)
        norm_width = features if self.norm_features is None else self.norm_features[1].shape[-1]
        checks.check_shape("initial_state.kv", kv, (n, H_kv, features, self.v.shape[3] // self.flows))
        checks.check_shape("initial_state.k", k, (n, H_kv, norm_width))
        checks.check_device("initial_state.kv", kv, self.q)
        checks.check_device("initial_state.k", k, self.q)

    def num_features(self, side: int) -> int:
        """Width of the features of q (side 0) or k (side 1)."""
        width = (self.q, self.k)[side].shape[3]
        own = self.maps[side]
        return width if own is None else own.num_features(width)

    @property
    def flows(self) -> int:
        """How many virtual heads the maps make of each head."""
        own = self.maps[1]
        return 1 if own is None else own.flows

    @property
    def maps(self) -> tuple[FeatureMap | None, FeatureMap | None]:
        """The feature maps of q and of k."""
        return self.feature_map if isinstance(self.feature_map, tuple) else (self.feature_map, self.feature_map)
