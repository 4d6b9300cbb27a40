"""What each layer of a converted model becomes, as plain data that is saved beside the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from linattn.mechanisms.registry import mechanism_info
from linattn.ops.checks import check_choice
from linattn.ops.hybrid_types import SalientBudget

Kind = Literal["hybrid", "mechanism"]
Features = Literal["np", "hedgehog", "t2r", "prf", "none"]
METHODS = ("still", "lolcats", "hedgehog", "t2r", "features", "zeros_softmax", "dof")
LOLCATS_WINDOW_FACTOR = 0.1  # where LoLCATs starts: the window weighs a tenth of the linear part
# Where STILL starts here. Its linear part counts in units of the strongest exact key, whose weight is 1: features that
# have not learned yet would outweigh the window together. Fixed at 1 the converted model stays worse than without them.
STILL_LINEAR_WEIGHT = 0.1


class LayerShape(NamedTuple):
    """What is known of an attention layer before it is converted."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    causal: bool


@dataclass(frozen=True)
class LayerPlan:
    """What one attention layer becomes.

    Args:
        kind: ``"hybrid"``: exact softmax over a window and over chosen tokens, linear attention over the rest;
            ``"mechanism"``: a registered one.
        features: of the linear part, see ``linattn.linearize.features``; ``"none"``: there is no linear part.
        feature_dim: F, before the two signs are laid side by side; of ``"prf"`` the number of features. None: D.
        window: exact tokens, 0: none; a bidirectional layer can have none.
        layout: ``"chunks"`` or ``"sliding"``, as in ``hybrid_attention``.
        delay: whole chunks before a query's own that are exact.
        ratio: share of each chunk's tokens that stay exact for good; None with a ``cap``: 1/16, else none.
        cap: at most so many of them at a time.
        sinks: first tokens that always stay.
        householder: a learned reflection in front of the NP map.
        gate: ``sigmoid(W x)`` on the numerator of the linear part.
        linear_weight: where a learned factor per head of the linear part starts; None: fixed at 1.
        units: what a linear weight is compared to, as in ``hybrid_attention``.
        mechanism: its name.
        options: its own options.
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
        for name, least in (("feature_dim", 1), ("window", 0), ("delay", 0), ("cap", 1), ("sinks", 0)):
            value = getattr(self, name)
            if value is None and name in ("feature_dim", "cap"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        if self.linear_weight is not None and not self.linear_weight > 0:
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
        self.budget  # noqa: B018, SalientBudget checks ratio, cap and sinks

    @property
    def budget(self) -> SalientBudget | None:
        """The budget of salient tokens; None where none are chosen."""
        if self.kind == "mechanism" or (self.ratio is None and self.cap is None):
            return None
        ratio = SalientBudget.ratio if self.ratio is None else self.ratio
        return SalientBudget(ratio=ratio, chunk=self.window, cap=self.cap, sinks=self.sinks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is as by default is left out."""
        own = asdict(self)
        defaults: dict[str, Any] = {f.name: {} if f.name == "options" else f.default for f in fields(self)}
        return {name: value for name, value in own.items() if value != defaults[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LayerPlan":
        unknown = values.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"a layer's plan has no field {', '.join(sorted(unknown))}")
        return cls(**values)


@dataclass(frozen=True)
class Plan:
    """The plans of the layers that are converted, by their number; the others stay as they are."""

    method: str
    layers: dict[int, LayerPlan]

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, "layers": {str(i): layer.to_dict() for i, layer in self.layers.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        layers = {int(i): LayerPlan.from_dict(layer) for i, layer in values["layers"].items()}
        return cls(str(values["method"]), layers)


def plan(method: str, shapes: Sequence[LayerShape], *, layers: Sequence[int] | None = None, **options: Any) -> Plan:
    """The plan of a named method for layers of these shapes.

    Args:
        method: one of ``METHODS``.
        shapes: of all layers, in order.
        layers: numbers of those to convert; None: all.
        options: fields of :class:`LayerPlan` that differ from the method's own; ``feature_dim`` may be a dict with one
            for each layer. Of ``"features"``: ``mechanism`` and that mechanism's options.

    Example:
        >>> from linattn.linearize.plan import LayerShape, plan
        >>> shapes = [LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, hidden=64, causal=True)] * 3
        >>> still = plan("still", shapes, layers=[1], cap=128)
        >>> still.layers[1].ratio, still.layers[1].cap, sorted(still.layers)
        (0.0625, 128, [1])
    """
    check_choice("method", method, METHODS)
    chosen = range(len(shapes)) if layers is None else layers
    for index in chosen:
        if not 0 <= index < len(shapes):
            raise ValueError(f"layers must name layers from 0 to {len(shapes) - 1}, got {index}")
    return Plan(method, {index: _layer_plan(method, index, shapes[index], dict(options)) for index in chosen})


def _layer_plan(method: str, index: int, shape: LayerShape, options: dict[str, Any]) -> LayerPlan:
    if method in ("features", "zeros_softmax"):
        return _mechanism_plan(method, shape, options)
    if not shape.causal and (method in ("still", "lolcats") or options.get("window")):
        raise ValueError(
            f"method {method!r} has a window of past tokens, and layer {index} is bidirectional: use "
            "'features', 'hedgehog', 't2r', 'dof' or 'zeros_softmax'"
        )
    dims = options.get("feature_dim")
    if isinstance(dims, Mapping):
        if index not in dims:
            raise ValueError(f"feature_dim names a dimension for the layers {sorted(dims)}, but none for layer {index}")
        options["feature_dim"] = int(dims[index])
    return LayerPlan.from_dict({"kind": "hybrid", **_defaults(method, shape, options), **options})


def _defaults(method: str, shape: LayerShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a method, before the user's own options."""
    weighed = options.get("window", LayerPlan.window) != 0 and options.get("features") != "none"
    if method == "still":
        weight = {"linear_weight": STILL_LINEAR_WEIGHT} if weighed else {}
        return {"features": "np", "ratio": 1 / 16, "sinks": 4, **weight}
    if method == "lolcats":
        half = max(shape.head_dim // 2, 1)
        weight = {"linear_weight": 1 / LOLCATS_WINDOW_FACTOR} if weighed else {}
        return {"features": "hedgehog", "feature_dim": half, **weight}
    if method == "dof":
        units = "one" if options.get("features", "prf") == "prf" else "row_max"
        return {"features": "prf", "window": 0, "units": units}
    return {"features": method, "window": 0}


def _mechanism_plan(method: str, shape: LayerShape, options: dict[str, Any]) -> LayerPlan:
    name = "zeros_softmax" if method == "zeros_softmax" else options.pop("mechanism", None)
    if name is None:
        raise ValueError("method 'features' needs mechanism=..., a name of linattn.list_mechanisms()")
    info = mechanism_info(name)
    if not (info.causal if shape.causal else info.bidirectional):
        only = "bidirectional" if shape.causal else "causal"
        raise ValueError(f"mechanism {name!r} is only {only}, and the model's attention is not")
    if shape.causal and info.state == "none":
        raise ValueError(f"mechanism {name!r} has no recurrent form, so the model could not generate with it")
    if name == "mirror":
        # Two reflections start as the identity; across heads they need as many keys as queries.
        options = {"reflections": 2, "cross_head": shape.num_heads == shape.num_kv_heads, **options}
    return LayerPlan("mechanism", mechanism=name, options=options)
