"""The methods of conversion, by name, and the plan that each makes for a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from linattn.convert.plan.layers import LayerPlan, LayerShape, Plan
from linattn.mechanisms.registry import mechanism_info
from linattn.ops.shared.checks import check_choice

METHODS = ("still", "lolcats", "hedgehog", "t2r", "features", "zeros_softmax", "dof")
LOLCATS_WINDOW_FACTOR = 0.1  # initial value in LoLCATs: the window weighs a tenth of the linear part
# Initial linear weight for STILL. In units of the strongest exact key and with a weight fixed at 1, features that have
# not learned yet would together outweigh the window, and the converted model stays worse than without them.
STILL_LINEAR_WEIGHT = 0.1
# The authors count in units of the strongest exact key ("row_max"): a sum over many tokens is then as heavy beside a
# clear match as without one, and grows with the text. Compared to e^s a match outweighs the rest, as in softmax.
STILL_UNITS = "one"
OF_THE_MODEL = ("num_heads", "head_dim", "num_kv_heads", "causal", "input_dim")  # arguments that the model sets


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
    chosen = range(len(shapes)) if layers is None else layers
    check_layers(chosen, len(shapes))
    if method not in ("features", "zeros_softmax"):
        _check_names(method, options)
    return Plan(method, {index: _layer_plan(method, index, shapes[index], dict(options)) for index in chosen})


def check_layers(layers: object, count: int) -> None:
    """Raise ValueError unless these are numbers of a model's layers, each given once."""
    numbers = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else None
    whole = numbers is not None and all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    if numbers is None or not numbers or not whole or len(set(numbers)) < len(numbers):
        raise ValueError(f"layers must be a list of different numbers from 0 to {count - 1}, or None, got {layers!r}")
    for index in numbers:
        if not 0 <= index < count:
            raise ValueError(f"layers must name layers from 0 to {count - 1}, got {index}")


def _check_names(method: str, options: Mapping[str, Any]) -> None:
    allowed = [each.name for each in fields(LayerPlan) if each.name not in ("kind", "mechanism", "options")]
    for name in options:
        if name not in allowed:
            more = ", cost, clip, tolerance (of features that layers share)" if method == "dof" else ""
            raise ValueError(f"{name} is no option of method {method!r}; it takes {', '.join(allowed)}{more}")


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
        options["feature_dim"] = dims[index]
    return LayerPlan.from_dict({"kind": "hybrid", **_defaults(method, shape, options), **options})


def _defaults(method: str, shape: LayerShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own fields of :class:`LayerPlan`, before the user's options."""
    weighed = options.get("window", LayerPlan.window) != 0 and options.get("features") != "none"
    if method == "still":
        weight = {"linear_weight": STILL_LINEAR_WEIGHT, "units": STILL_UNITS} if weighed else {}
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
    for option in OF_THE_MODEL:
        if option in options:
            raise ValueError(f"{option} is as the model has it, and no option of a conversion: leave it out")
    if not (info.causal if shape.causal else info.bidirectional):
        only = "bidirectional" if shape.causal else "causal"
        raise ValueError(f"mechanism {name!r} is only {only}, and the model's attention is not")
    if shape.causal and info.state == "none":
        raise ValueError(f"mechanism {name!r} has no recurrent form, so the model could not generate with it")
    if name == "mirror":
        # Two reflections start as the identity; across heads they need as many key heads as query heads.
        options = {"reflections": 2, "cross_head": shape.num_heads == shape.num_kv_heads, **options}
    return LayerPlan("mechanism", mechanism=name, options=options)
