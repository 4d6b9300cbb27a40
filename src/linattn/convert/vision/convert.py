"""Replaces the attention inside a timm model."""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, Literal

from torch import nn

from linattn.convert.vision.base import ConvertedAttention, Plan
from linattn.convert.vision.beit import BeitAttention, drop_shared_bias
from linattn.convert.vision.planes import find_tokens
from linattn.convert.vision.pvt import ReducedAttention
from linattn.convert.vision.report import ConversionReport, Converted
from linattn.convert.vision.swin import WindowedAttention
from linattn.convert.vision.tokens import RotaryAttention, TokenAttention
from linattn.layers.attention_options import LAYER_SETS
from linattn.mechanisms.registry import mechanism_info
from linattn.ops.shared.checks import check_choice

# By the full name of the class, so that timm need not be imported; older releases defined ViT's in the model's file.
KNOWN: dict[str, type[ConvertedAttention]] = {
    "timm.layers.attention.Attention": TokenAttention,
    "timm.models.vision_transformer.Attention": TokenAttention,
    "timm.layers.attention.AttentionRope": RotaryAttention,
    "timm.models.eva.EvaAttention": RotaryAttention,
    "timm.models.beit.Attention": BeitAttention,
    "timm.models.swin_transformer.WindowAttention": WindowedAttention,
    "timm.models.pvt_v2.Attention": ReducedAttention,
}


def convert(
    model: nn.Module,
    mechanism: str,
    *,
    layers: Sequence[int | str] | None = None,
    rotary: Literal["inputs", "features"] = "inputs",
    reduction: Literal["keep", "drop"] = "keep",
    impl: str = "auto",
    **mechanism_options: Any,
) -> Converted:
    """Replace the attention layers of a timm model by ``mechanism``, in place, and report what changed.

    Supports ViT, DeiT, DeiT III, DINOv2, SigLIP, EVA, BEiT, Swin and PVTv2. Projections, biases, norms of q and k,
    rotary positions, and gates and norms of the output stay, under their names; the mechanism's own parameters are new.
    A relative position bias, which only scores can hold, is dropped unless the mechanism has scores.

    With ``"softmax"`` the model computes what it did before; ``"zeros_softmax"`` starts there, and ``"mirror",
    reflections=2`` starts with the model's q.k, before its ReLU. The same call on a fresh model builds one that the
    state dict fits. If it raises, nothing was changed.

    Args:
        model: a timm model, or one converted before.
        mechanism: a name of ``linattn.list_mechanisms()``.
        layers: which layers, in the order of the model: numbers, where negative ones count from the end, or patterns of
            names such as ``"stages.0.*"``; None: all.
        rotary: what rotary positions turn: ``"inputs"``, queries and keys as in the model, or ``"features"``, those of
            the numerator, as in papers of linear attention.
        reduction: reduction of keys in PVTv2: ``"keep"``, or ``"drop"``, so that every token gives a key.
        impl: form of the algebra, as in ``linear_attention``.
        mechanism_options: options of the mechanism.

    Returns:
        ``(model, report)``; ``print(report)`` shows a summary.

    Example:
        >>> import timm
        >>> from linattn.models.vision import convert
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
        >>> model, report = convert(model, "mirror", reflections=2)
        >>> list(report.changed)
        ['blocks.0.attn', 'blocks.1.attn']
    """
    check_choice("rotary", rotary, ("inputs", "features"))
    check_choice("reduction", reduction, ("keep", "drop"))
    mechanism_info(mechanism)
    for name in mechanism_options:
        if name in LAYER_SETS:
            raise TypeError(f"mechanism_options must not hold {name!r}: the layer sets it")
    found = _attentions(model)
    chosen = _chosen(found, layers)
    _refuse_unknown(model, found, chosen, everything=layers is None)
    plan = Plan(mechanism, dict(mechanism_options), impl, rotary, reduction, *find_tokens(model))
    new = {name: _replacement(found[name], plan) for name in chosen if not _has(found[name], plan)}
    if not new:
        raise ValueError(f"nothing to change: all {len(chosen)} layers asked for have {mechanism} with these options")
    report = ConversionReport(mechanism, left=[name for name in found if name not in new] + _pools(model))
    for name, layer in new.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
        _note(report, name, found[name], layer)
    report.dropped |= drop_shared_bias(model)
    plan.planes.watch()
    return Converted(model, report)


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    known = ((name, module) for name, module in model.named_modules() if _kind(module) is not None)
    return {name: module for name, module in known if name}


def _kind(module: nn.Module) -> type[ConvertedAttention] | None:
    if isinstance(module, ConvertedAttention):
        return type(module)
    return KNOWN.get(f"{type(module).__module__}.{type(module).__qualname__}")


def _chosen(found: dict[str, nn.Module], layers: Sequence[int | str] | None) -> list[str]:
    names = list(found)
    if layers is None:
        return names
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise TypeError(f"layers must be a list of numbers or patterns of names, or None, got {layers!r}")
    picked: set[str] = set()
    for item in layers:
        if isinstance(item, str):
            own = [name for name in names if fnmatch(name, item)]
        else:
            own = [names[item]] if -len(names) <= item < len(names) else []
        if not own:
            raise ValueError(f"layers has {item!r}, but the model's are 0 to {len(names) - 1}: {', '.join(names)}")
        picked.update(own)
    if not picked:
        raise ValueError("nothing to change: layers is empty")
    return [name for name in names if name in picked]


def _refuse_unknown(model: nn.Module, found: dict[str, nn.Module], chosen: list[str], everything: bool) -> None:
    inside = tuple(f"{name}." for name in found)
    others = {
        f"{type(module).__module__}.{type(module).__qualname__}": name
        for name, module in model.named_modules()
        if _looks_like_attention(module) and name not in found and not name.startswith(inside)
    }
    if chosen and not (everything and others):
        return
    what = "; ".join(f"{kind} ({name or 'the model itself'})" for kind, name in others.items())
    hint = "; layers=[...] converts the known ones alone" if chosen else ""
    raise ValueError(
        f"{type(model).__name__} has {what or 'no attention'}, which is not known here. Known: {', '.join(KNOWN)}{hint}"
    )


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module with weights is named like attention, or is a block with attention's projections inside."""
    name = type(module).__name__.lower()
    called = ("attn" in name or "attention" in name) and "pool" not in name
    inline = name.endswith("block") and ("qkv" in module._modules or "in_proj" in module._modules)
    return (called or inline) and next(module.parameters(), None) is not None


def _pools(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if "attentionpool" in type(m).__name__.lower().replace("_", "")]


def _has(old: nn.Module, plan: Plan) -> bool:
    return isinstance(old, ConvertedAttention) and old.plan == plan


def _replacement(old: nn.Module, plan: Plan) -> ConvertedAttention:
    kind = _kind(old)
    assert kind is not None
    return kind(old, plan)


def _note(report: ConversionReport, name: str, old: nn.Module, new: ConvertedAttention) -> None:
    before = old.plan.mechanism if isinstance(old, ConvertedAttention) else type(old).__name__
    report.changed[name] = f"{before} -> {report.mechanism}"
    own = {id(p) for p in old.parameters()}
    for parameter, value in new.named_parameters():
        (report.kept if id(value) in own else report.initialised).append(f"{name}.{parameter}")
    report.dropped |= {f"{name}.{part}": why for part, why in new.dropped.items()}
    if isinstance(old, ConvertedAttention):
        report.dropped |= {
            f"{name}.mechanism.{part}": f"it was {before}'s own" for part, _ in old.mechanism.named_parameters()
        }
