"""Plans of layers: what each one is converted to, as plain data that is saved beside the weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from linattn.mechanisms.registry import mechanism_info
from linattn.ops.hybrid.types import REDUCTIONS, SCORES, Reduce, SalientBudget, Score
from linattn.ops.shared.checks import check_choice

Kind = Literal["hybrid", "mechanism"]
Features = Literal["np", "hedgehog", "t2r", "prf", "none"]


class LayerShape(NamedTuple):
    """Shapes of an attention layer, known before it is converted."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    causal: bool


@dataclass(frozen=True)
class LayerPlan:
    """What one attention layer is converted to.

    Args:
        kind: ``"hybrid"``: exact softmax over a window and over chosen tokens, linear attention over the rest;
            ``"mechanism"``: a registered mechanism.
        features: features of the linear part, see ``linattn.convert.layer.features``; ``"none"``: no linear part.
        feature_dim: F, before the two signs are concatenated; for ``"prf"`` the number of features. None: D.
        window: number of exact tokens, 0: none; a bidirectional layer can have none.
        layout: ``"chunks"`` or ``"sliding"``, as in ``hybrid_attention``.
        delay: number of whole chunks before a query's own that are exact.
        ratio: share of each chunk's tokens that stay exact for good, as a whole number of tokens and at least one; None
            with a ``cap``: 1/16, else none.
        cap: most of these tokens that are kept at a time.
        sinks: number of first tokens that always stay.
        score: how these tokens are chosen, ``"log_prob"`` or ``"kl"``: the ``kind`` of ``self_saliency``.
        reduce: how the scores of query heads that share a key head are combined, ``"mean"`` or ``"max"``.
        householder: a learned reflection before the NP map.
        gate: ``sigmoid(W x + b)`` on the numerator of the linear part. W starts at 0 and b at 4, so that the gate
            starts open; the published one of STILL is ``sigmoid(W x)``, without b.
        linear_weight: initial value of a learned factor of the linear part, per head; None: fixed at 1.
        units: what a linear weight is compared to, as in ``hybrid_attention``.
        mechanism: name of the mechanism.
        options: options of the mechanism.
    """

    kind: Kind
    features: Features = "np"
    feature_dim: int | None = None
    window: int = 64
    layout: Literal["chunks", "sliding"] = "chunks"
    delay: int = 1
    ratio: float | None = None
    cap: int | None = None
    sinks: int = 4
    score: Score = "log_prob"
    reduce: Reduce = "mean"
    householder: bool = False
    gate: bool = False
    linear_weight: float | None = None
    units: Literal["row_max", "one"] = "row_max"
    mechanism: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        if self.kind == "mechanism":
            if self.mechanism is None:
                raise ValueError("mechanism must be a name of linattn.list_mechanisms() where kind is 'mechanism'")
            mechanism_info(self.mechanism)
            return
        if self.mechanism is not None or self.options:
            raise ValueError("mechanism and options need kind='mechanism'; a hybrid layer has features instead")
        self._check_hybrid()

    def _check_hybrid(self) -> None:
        check_choice("features", self.features, get_args(Features))
        check_choice("layout", self.layout, ("chunks", "sliding"))
        check_choice("units", self.units, ("row_max", "one"))
        check_choice("score", self.score, SCORES)
        check_choice("reduce", self.reduce, REDUCTIONS)
        for name in ("householder", "gate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, least in (("feature_dim", 1), ("window", 0), ("delay", 0), ("cap", 1), ("sinks", 0)):
            value = getattr(self, name)
            if value is None and name in ("feature_dim", "cap"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        if self.linear_weight is not None and not _is_number(self.linear_weight, above=0):
            raise ValueError(f"linear_weight must be a number > 0 or None (fixed at 1), got {self.linear_weight!r}")
        if self.linear_weight is not None and not (self.window and self.features != "none"):
            raise ValueError("linear_weight weighs the linear part against the exact one: it needs both")
        if self.features == "none" and not self.window:
            raise ValueError("features='none' has no linear part and window=0 no exact one: nothing would be seen")
        if self.householder and self.features != "np":
            raise ValueError(f"householder is a part of the NP map: it needs features='np', got {self.features!r}")
        if self.features == "prf" and self.window and self.units != "one":
            raise ValueError("features='prf' approximate the exponential itself: beside a window they need units='one'")
        if (self.ratio is not None or self.cap is not None) and not self.window:
            raise ValueError("ratio and cap choose tokens that leave a window: they need window > 0")
        if self.ratio is not None and not _is_number(self.ratio):
            raise ValueError(f"ratio must be a number from 0 to 1, got {self.ratio!r}")
        chooses = self.budget is not None and self.budget.per_chunk > 0  # SalientBudget checks ratio, cap and sinks
        for name, value, usual in (("score", self.score, "log_prob"), ("reduce", self.reduce, "mean")):
            if value != usual and not chooses:
                raise ValueError(f"{name} ranks tokens that stay exact, got {value!r}: it needs a ratio > 0, or a cap "
                                 "and no ratio")  # fmt: skip

    @property
    def budget(self) -> SalientBudget | None:
        """The budget of salient tokens; None if none are chosen."""
        if self.kind == "mechanism" or (self.ratio is None and self.cap is None):
            return None
        ratio = SalientBudget.ratio if self.ratio is None else self.ratio
        return SalientBudget(
            ratio=ratio, chunk=self.window, cap=self.cap, sinks=self.sinks, score=self.score, reduce=self.reduce
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without those that equal the defaults."""
        own = asdict(self)
        defaults: dict[str, Any] = {f.name: {} if f.name == "options" else f.default for f in fields(self)}
        return {name: value for name, value in own.items() if value != defaults[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LayerPlan":
        unknown = values.keys() - {f.name for f in fields(cls)}
        if unknown:
            names = ", ".join(f.name for f in fields(cls))
            raise ValueError(
                f"a layer's plan has no field {', '.join(sorted(map(str, unknown)))}; its fields are {names}"
            )
        return cls(**values)


@dataclass(frozen=True)
class Plan:
    """The plans of the layers that are converted, by number; layers without one stay as they are."""

    method: str
    layers: dict[int, LayerPlan]

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, "layers": {str(i): layer.to_dict() for i, layer in self.layers.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        layers = {int(i): LayerPlan.from_dict(layer) for i, layer in values["layers"].items()}
        return cls(str(values["method"]), layers)


def _is_number(value: object, above: float = -math.inf) -> bool:
    """Whether the value is a finite number above ``above``; booleans are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf
