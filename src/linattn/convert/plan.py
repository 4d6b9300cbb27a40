"""Plans: what each layer of a model is converted to, as plain data that is saved beside the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from linattn.mechanisms.registry import mechanism_info
from linattn.ops.hybrid.types import Reduce, SalientBudget, Score
from linattn.ops.shared.call import check_choice
from linattn.support.config import Config, option

METHODS = ("still", "lolcats", "hedgehog", "t2r", "features", "zeros_softmax", "dof")
LOLCATS_WINDOW_FACTOR = 0.1  # initial value in LoLCATs: the window weighs a tenth of the linear part
# Initial linear weight for STILL. In units of the strongest exact key and with a weight fixed at 1, features that have
# not learned yet would together outweigh the window, and the converted model stays worse than without them.
STILL_LINEAR_WEIGHT = 0.1
# The authors count in units of the strongest exact key ("row_max"): a sum over many tokens is then as heavy beside a
# clear match as without one, and grows with the text. Compared to e^s a match outweighs the rest, as in softmax.
STILL_UNITS = "one"
OF_THE_MODEL = ("num_heads", "head_dim", "num_kv_heads", "causal", "input_dim")  # arguments that the model sets


class LayerShape(NamedTuple):
    """Shapes of an attention layer, known before it is converted."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    causal: bool


@dataclass(frozen=True)
class LayerPlan(Config):
    """What one attention layer is converted to.

    Args:
        kind: ``"hybrid"``: exact softmax over a window and over chosen tokens, linear attention over the rest;
            ``"mechanism"``: a registered mechanism.
        features: features of the linear part, see ``linattn.convert.core``; ``"none"``: no linear part.
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
        gate: ``sigmoid(W x + b)`` on the numerator of the linear part. W starts at 0 and b at 4, so that the gate
            starts open; the published one of STILL is ``sigmoid(W x)``, without b.
        linear_weight: initial value of a learned factor of the linear part, per head; None: fixed at 1.
        units: what a linear weight is compared to, as in ``hybrid_attention``.
        mechanism: name of the mechanism.
        options: options of the mechanism.
        impl, rotary, reduction: of vision models, see ``linattn.models.vision.convert``.
    """

    kind: Literal["hybrid", "mechanism"]
    features: Literal["np", "hedgehog", "t2r", "prf", "none"] = "np"
    feature_dim: int | None = option(None, least=1)
    window: int = option(64, least=0)
    layout: Literal["chunks", "sliding"] = "chunks"
    delay: int = option(1, least=0)
    ratio: float | None = option(None, least=0, most=1)
    cap: int | None = option(None, least=1)
    sinks: int = option(4, least=0)
    score: Score = "log_prob"
    reduce: Reduce = "mean"
    gate: bool = False
    linear_weight: float | None = option(None, above=0)
    units: Literal["row_max", "one"] = "row_max"
    mechanism: str | None = None
    options: dict[str, Any] = option({})
    impl: str = "auto"
    rotary: Literal["inputs", "features"] = "inputs"
    reduction: Literal["keep", "drop"] = "keep"

    def check(self) -> None:
        if self.kind == "mechanism":
            mechanism_info(str(self.mechanism))
            return
        chooses = self.ratio is not None or self.cap is not None
        ranked = chooses and self.window > 0 and self.ratio != 0
        refused = {
            "mechanism and options need kind='mechanism'": self.mechanism is not None or self.options,
            "linear_weight weighs the linear part against the exact one: it needs both":
                self.linear_weight is not None and not (self.window and self.features != "none"),
            "features='none' has no linear part and window=0 no exact one: nothing would be seen":
                self.features == "none" and not self.window,
            "features='prf' approximate the exponential itself: beside a window they need units='one'":
                self.features == "prf" and self.window and self.units != "one",
            "ratio and cap choose tokens that leave a window: they need window > 0":
                chooses and not self.window,
            "score and reduce rank tokens that stay exact: they need a ratio > 0, or a cap and no ratio":
                (self.score, self.reduce) != ("log_prob", "mean") and not ranked,
        }  # fmt: skip
        for reason, holds in refused.items():
            if holds:
                raise ValueError(reason)
        _ = self.budget  # which checks the rest

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
        defaults: dict[str, Any] = {own.name: {} if own.name == "options" else own.default for own in fields(self)}
        return {name: value for name, value in self.values().items() if value != defaults[name]}


@dataclass(frozen=True)
class Plan:
    """The plans of the layers that are converted, by number; layers without one stay as they are."""

    method: str
    layers: dict[int, LayerPlan]

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, "layers": {str(i): layer.to_dict() for i, layer in self.layers.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        return cls(values["method"], {int(i): LayerPlan(**layer) for i, layer in values["layers"].items()})


def plan(method: str, shapes: Sequence[LayerShape], *, layers: Sequence[int] | None = None, **options: Any) -> Plan:
    """Make the plan of a named method for layers of the given shapes.

    Args:
        method: one of ``METHODS``.
        shapes: shapes of all layers, in order.
        layers: numbers of the layers to convert; None: all.
        options: fields of :class:`LayerPlan` that differ from the method's own; ``feature_dim`` may be a dict with a
            value for each layer. For the method ``"features"``: ``mechanism`` and that mechanism's options.

    Example:
        >>> from linattn.convert.plan import LayerShape, plan
        >>> shapes = [LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, hidden=64, causal=True)] * 3
        >>> still = plan("still", shapes, layers=[1], cap=128)
        >>> still.layers[1].ratio, still.layers[1].cap, sorted(still.layers)
        (0.0625, 128, [1])
    """
    check_choice("method", method, METHODS)
    layers = range(len(shapes)) if layers is None else layers
    numbers = layers if isinstance(layers, Sequence) else ()
    whole = all(type(each) is int and 0 <= each < len(shapes) for each in numbers)
    if not numbers or not whole or len(set(numbers)) < len(numbers):
        most = len(shapes) - 1
        raise ValueError(f"layers must be a list of different numbers from 0 to {most}, or None, got {layers!r}")
    of_mechanism = method in ("features", "zeros_softmax")
    others = ("kind", "mechanism", "options", "impl", "rotary", "reduction")
    allowed = [own.name for own in fields(LayerPlan) if own.name not in others]
    for name in () if of_mechanism else options:
        if name not in allowed:
            more = ", cost, clip, tolerance (of features that layers share)" if method == "dof" else ""
            raise ValueError(f"{name} is no option of method {method!r}; it takes {', '.join(allowed)}{more}")
    make = _mechanism_plan if of_mechanism else _hybrid_plan
    return Plan(method, {index: make(method, index, shapes[index], dict(options)) for index in layers})


def _hybrid_plan(method: str, index: int, shape: LayerShape, options: dict[str, Any]) -> LayerPlan:
    if not shape.causal and (method in ("still", "lolcats") or options.get("window")):
        raise ValueError(
            f"method {method!r} has a window of past tokens, and layer {index} is bidirectional: use "
            "'features', 'hedgehog', 't2r', 'dof' or 'zeros_softmax'"
        )
    dims = options.get("feature_dim")
    if isinstance(dims, Mapping):
        if index not in dims:
            raise ValueError(f"feature_dim names a dimension for the layers {sorted(dims)}, but none for layer {index}")
        options["feature_dim"] = dims[index]
    weighed = options.get("window", LayerPlan.window) != 0 and options.get("features") != "none"
    own: dict[str, Any] = {"features": method, "window": 0}
    if method == "still":
        own = {"features": "np", "ratio": 1 / 16}
        own |= {"linear_weight": STILL_LINEAR_WEIGHT, "units": STILL_UNITS} if weighed else {}
    elif method == "lolcats":
        own = {"features": "hedgehog", "feature_dim": max(shape.head_dim // 2, 1)}
        own |= {"linear_weight": 1 / LOLCATS_WINDOW_FACTOR} if weighed else {}
    elif method == "dof":
        own |= {"features": "prf", "units": "one" if options.get("features", "prf") == "prf" else "row_max"}
    return LayerPlan(kind="hybrid", **(own | options))


def _mechanism_plan(method: str, index: int, shape: LayerShape, options: dict[str, Any]) -> LayerPlan:
    name = "zeros_softmax" if method == "zeros_softmax" else options.pop("mechanism", None)
    if name is None:
        raise ValueError("method 'features' needs mechanism=..., a name of linattn.list_mechanisms()")
    info = mechanism_info(name)
    for given in OF_THE_MODEL:
        if given in options:
            raise ValueError(f"{given} is as the model has it, and no option of a conversion: leave it out")
    if not (info.causal if shape.causal else info.bidirectional):
        only = "bidirectional" if shape.causal else "causal"
        raise ValueError(f"mechanism {name!r} is only {only}, and the attention of layer {index} is not")
    if shape.causal and info.state == "none":
        raise ValueError(f"mechanism {name!r} has no recurrent form, so the model could not generate with it")
    if name == "mirror":
        # Two reflections start as the identity; across heads they need as many key heads as query heads.
        options = {"reflections": 2, "cross_head": shape.num_heads == shape.num_kv_heads, **options}
    return LayerPlan("mechanism", mechanism=name, options=options)
