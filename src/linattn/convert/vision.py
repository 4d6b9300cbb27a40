"""Other attention inside models of timm: ViT, DeiT, DeiT III, DINOv2, SigLIP, EVA, BEiT, Swin and PVTv2."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.convert.adapters.timm import KNOWN, TABLE, TimmAttention, class_path, pair
from linattn.convert.convert import ReplacedAttention
from linattn.convert.plan import LayerPlan
from linattn.layers.attention import Attention
from linattn.layers.attention_options import check_mechanism_options
from linattn.layers.plane import mechanism_plane, prefix_option
from linattn.mechanisms.mirror import Mirror
from linattn.mechanisms.registry import create_mechanism
from linattn.mechanisms.softmax import Softmax
from linattn.mechanisms.zeros_softmax import ZerosSoftmax
from linattn.ops.shared.call import compute_dtype, without_autocast

HIDDEN = -50.0  # Swin hides a key by a bias of -100: keys with a bias below this are hidden


@dataclass
class ConversionReport:
    """What a conversion did, with names as in ``model.named_modules()`` and ``model.state_dict()``; prints a summary.

    ``changed``: the attention layers that were replaced, and by what. ``left``: those that were not asked for, and
    attention pools, which are not part of the blocks. ``kept``, ``initialised``: parameters of the changed layers that
    are the model's own, and those that are new. ``dropped``: what the mechanism cannot hold, and why.
    """

    mechanism: str
    changed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Names that differ only in their number share a line: ``blocks.*.attn.qkv.weight (12)``."""
        lines = [f"converted to {self.mechanism}: {len(self.changed)} layers of attention"]
        for title in ("changed", "left", "kept", "initialised", "dropped"):
            found: dict[str, str] | list[str] = getattr(self, title)
            texts = [f"{n}: {what}" for n, what in found.items()] if isinstance(found, dict) else found
            counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", text) for text in texts)
            lines += [f"  {title:<12} {text}" + (f" ({n})" if n > 1 else "") for text, n in counts.items()]
        return "\n".join(lines)


class Converted(NamedTuple):
    """The given model, changed in place, and the report of the conversion."""

    model: nn.Module
    report: ConversionReport


class Planes:
    """The planes into which a model cuts images, by their number of tokens, for layers that are not passed them.

    A model with a fixed image size has one grid. One that takes images of any size (``dynamic_img_size=True``) is
    watched, since the same number of tokens may be 4 x 4 or 2 x 8. If tokens were dropped, there is no plane.
    """

    patch_embed: Any

    def __init__(self, model: nn.Module) -> None:
        hosts = (own for own in model.modules() if isinstance(getattr(own, "num_prefix_tokens", None), int))
        host: Any = next((own for own in hosts if hasattr(own, "patch_embed")), None)
        self.patch_embed = getattr(host, "patch_embed", None)
        self.num_prefix_tokens = int(getattr(host, "num_prefix_tokens", 0))
        self.dynamic = bool(getattr(host, "dynamic_img_size", False))
        self.seen: dict[int, tuple[int, int]] = {}

    def note(self, patch_embed: Any, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of a model for images of any size."""
        height, width = patch_embed.dynamic_feat_size(inputs[0].shape[-2:])
        self.seen[height * width] = (height, width)

    def find(self, tokens: int) -> tuple[int, int] | None:
        if self.dynamic:
            return self.seen.get(tokens)
        grid = getattr(self.patch_embed, "grid_size", None)  # read anew each time: timm's set_input_size changes it
        return None if grid is None or prod(grid) != tokens else (int(grid[0]), int(grid[1]))


class ConvertedAttention(ReplacedAttention):
    """A layer of timm with its parameters, under their own names, and ``mechanism`` in place of softmax.

    ``y = proj(mechanism(q, k, v))``, with the layer's own norms of q and k, rotary positions, and norm and gate of the
    output; the adapter knows how the layer makes q, k and v, and what it passes with them.
    """

    adapter: TimmAttention
    proj: Any
    num_heads: int
    mechanism: Any
    relative_position_bias_table: Any

    def __init__(self, old: nn.Module, adapter: TimmAttention, plan: LayerPlan, planes: Planes) -> None:
        super().__init__(old, adapter)
        self.plan, self.planes, self.dropped = plan, planes, dict[str, str]()
        self.num_kv_heads = int(getattr(old, "num_kv_heads", old.num_heads))  # type: ignore[arg-type]
        weight = self.proj.weight
        self.head_dim = int(getattr(old, "head_dim", 0)) or weight.shape[1] // self.num_heads
        self.num_prefix_tokens = int(getattr(old, "num_prefix_tokens", planes.num_prefix_tokens))
        self.own_prefix = self.num_prefix_tokens if adapter.prefixed else 0
        name = str(plan.mechanism)
        with torch.device(weight.device):
            mechanism = create_mechanism(
                name, num_heads=self.num_heads, head_dim=self.head_dim, num_kv_heads=self.num_kv_heads,
                impl=plan.impl, input_dim=adapter.input_dim(self), **prefix_option(name, self.own_prefix, plan.options),
            ).to(weight.dtype)  # fmt: skip
        self.mechanism = mechanism.train(self.training)
        self.has_scores = isinstance(mechanism, Softmax | ZerosSoftmax)  # which a bias or a mask can be added to
        adapter.check(self)
        if not self.has_scores:
            for bias, what in adapter.biases.items():
                self.drop(bias, f"{what} is added to scores, and {name} has none")
            if (rate := self.drop_rate) > 0:
                self.dropped["attn_drop"] = f"dropout {rate:g} is of weights, and {name} never has them"

    def drop(self, name: str, why: str) -> None:
        """Remove a part and record why, if the layer has it."""
        part = getattr(self, name, None)
        if isinstance(part, nn.Module):
            self.dropped |= {f"{name}.{own}": why for own, _ in part.named_parameters()}
        elif isinstance(part, nn.Parameter):
            self.dropped[name] = why
        if part is not None:
            setattr(self, name, None)

    @property
    def drop_rate(self) -> float:
        return float(getattr(getattr(self, "attn_drop", None), "p", 0.0))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, named = self.adapter.hidden(args, kwargs)
        return self.adapter.merge(self, self.adapter.attend(self, x, **named), **named)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        key_mask: Tensor | None = None,
        rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        spatial_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """Heads ``(B, H, T, D)``; ``bias`` broadcasts to ``(B, H, Tq, Tk)`` and is added to the scores.

        ``rotate`` turns q and k or, with ``rotary="features"``, the features that the mechanism makes of them.
        """
        dropout = self.drop_rate if self.training else 0.0
        with_scores = self.has_scores and (bias is not None or dropout > 0)
        if rotate is not None and (self.plan.rotary == "inputs" or with_scores):
            q, k = rotate(q, k)
            rotate = None
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotations may widen them under autocast
        if not with_scores:
            plane = mechanism_plane(self.mechanism, spatial_shape, self.own_prefix)
            own = x if self.mechanism.info.uses_input else None
            return self.mechanism(q, k, v, x=own, key_mask=key_mask, rotate=rotate, spatial_shape=plane)
        if key_mask is not None:
            hidden = torch.zeros_like(key_mask, dtype=q.dtype).masked_fill(~key_mask, -torch.inf)[:, None, None]
            bias = hidden if bias is None else bias + hidden
        bias = None if bias is None else bias.to(q.dtype)
        if isinstance(self.mechanism, ZerosSoftmax):
            return biased_zeros(self.mechanism, q, k, v, x, bias, dropout)
        grouped, scale = self.num_heads != self.num_kv_heads, self.mechanism.scale
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=scale, enable_gqa=grouped)

    def plane(self, length: int) -> tuple[int, int] | None:
        """The plane of ``length`` tokens, prefix tokens included, for models that do not pass it to their layers."""
        return self.planes.find(length - self.num_prefix_tokens)

    def set_window_size(self, window_size: int | tuple[int, int]) -> None:
        """Called by timm's Swin for other image sizes; a table of positions is resized, as in timm."""
        if self.relative_position_bias_table is not None:
            from timm.models.swin_transformer import WindowAttention

            WindowAttention.set_window_size(self, pair(window_size))  # type: ignore[arg-type]
        self.window_size: Any = pair(window_size)


def biased_zeros(
    mechanism: ZerosSoftmax, q: Tensor, k: Tensor, v: Tensor, x: Tensor, bias: Tensor | None, dropout: float
) -> Tensor:
    """ZeroS-SM by its formula, for logits ``z = q.k / sqrt(D) + bias`` and the keys that the bias does not hide.

    ``w = gh softmax(z) + ((g1 - gh) (z - mean z) + (g0 - gh)) / N``; with all gates at 1 this is biased softmax.
    """
    dtype, out_dtype = compute_dtype(q, k, v), v.dtype
    g1, gh, g0 = mechanism.gates(x)
    with without_autocast(q):
        group = mechanism.num_heads // mechanism.num_kv_heads
        q, k, v = (t.to(dtype) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        z = q @ k.mT * mechanism.head_dim**-0.5
        seen = torch.ones_like(z[:, :1, :1])
        if bias is not None:
            z, seen = z + bias, (bias > HIDDEN).to(dtype)
        count = seen.sum(-1, keepdim=True).clamp(min=1)
        scores = torch.where(seen > 0, z, 0.0)
        centred = scores - (scores * seen).sum(-1, keepdim=True) / count
        weights = gh * z.softmax(-1) + seen * ((g1 - gh) * centred + (g0 - gh)) / count
        return (F.dropout(weights, dropout, training=dropout > 0) @ v).to(out_dtype)


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
        model: a timm model.
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
    plan = LayerPlan("mechanism", mechanism=mechanism, options=mechanism_options, impl=impl, rotary=rotary,
                     reduction=reduction)  # fmt: skip
    check_mechanism_options(mechanism_options)
    if any(isinstance(own, ReplacedAttention) for own in model.modules()):
        raise ValueError("the model is converted already; make it anew to convert it in another way")
    found = {name: own for name, own in model.named_modules() if class_path(own) in KNOWN}
    chosen, planes = _chosen(list(found), layers), Planes(model)
    _refuse_unknown(model, list(found), complete=bool(found) and layers is not None)
    new = {name: ConvertedAttention(found[name], KNOWN[class_path(found[name])], plan, planes) for name in chosen}
    pools = [n for n, m in model.named_modules() if "attentionpool" in type(m).__name__.lower().replace("_", "")]
    report = ConversionReport(mechanism, left=[name for name in found if name not in new] + pools)
    for name, layer in new.items():
        own = {id(parameter) for parameter in found[name].parameters()}
        model.set_submodule(name, layer)
        report.changed[name] = f"{type(found[name]).__name__} -> {mechanism}"
        for parameter, value in layer.named_parameters():
            (report.kept if id(value) in own else report.initialised).append(f"{name}.{parameter}")
        report.dropped |= {f"{name}.{part}": why for part, why in layer.dropped.items()}
    report.dropped |= _drop_shared_bias(model)
    if planes.dynamic:
        planes.patch_embed.register_forward_pre_hook(planes.note)
    return Converted(model, report)


def _chosen(names: list[str], layers: Sequence[int | str] | None) -> list[str]:
    if layers is None:
        return names
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


def _refuse_unknown(model: nn.Module, found: list[str], complete: bool) -> None:
    """Raise if there is no attention, or more than the adapters know, unless the layers were named.

    Attention is what has weights and is named like it, or a block with its projections inside.
    """
    others = {}
    for name, module in model.named_modules():
        kind, parts = type(module).__name__.lower(), module._modules.keys()
        called = ("attn" in kind or "attention" in kind) and "pool" not in kind
        inline = kind.endswith("block") and bool(parts & {"qkv", "in_proj"})
        weighted = next(module.parameters(), None) is not None
        if (called or inline) and weighted and not any(f"{name}.".startswith(f"{own}.") for own in found):
            others[class_path(module)] = name
    if complete or (found and not others):
        return
    what = "; ".join(f"{kind} ({name or 'the model itself'})" for kind, name in others.items())
    hint = "; layers=[...] converts the known ones alone" if found else ""
    raise ValueError(
        f"{type(model).__name__} has {what or 'no attention'}, which is not known here. Known: {', '.join(KNOWN)}{hint}"
    )


def _drop_shared_bias(model: nn.Module) -> dict[str, str]:
    """Remove the bias that all layers share from a BEiT in which no layer can use it."""
    dropped: dict[str, str] = {}
    for prefix, host in model.named_modules():
        shared, blocks = getattr(host, "rel_pos_bias", None), getattr(host, "blocks", None)
        if not isinstance(shared, nn.Module) or not isinstance(blocks, nn.ModuleList):
            continue
        if not any(getattr(block.attn, "has_scores", True) for block in blocks):
            start = f"{prefix}." if prefix else ""
            why = f"{TABLE} is added to scores, and the mechanism has none"
            dropped |= {f"{start}rel_pos_bias.{name}": why for name, _ in shared.named_parameters()}
            host.rel_pos_bias = None
    return dropped


def fold_reflections(model: nn.Module) -> list[str]:
    """Merge the fixed reflections of every mirror into its layer's projections, in place; returns the layers' names.

    ``W_q <- H W_q``, ``b_q <- H b_q``, and the same for k. Outputs do not change. Needs ``modulation="none"``:
    otherwise reflections depend on the input, and this raises an error, as it does if anything stands between
    projection and mechanism. If it raises, nothing was changed.

    Example:
        >>> from linattn.models.vision import create_pyramid, fold_reflections
        >>> options = {"mirror": {"modulation": "none"}}
        >>> model = create_pyramid("mirror", "xt", depths=(1, 1, 1, 1), mechanism_options=options)
        >>> fold_reflections(model)
        ['stages.0.blocks.0.attn', 'stages.1.blocks.0.attn']
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Attention | ConvertedAttention)
        and isinstance(layer.mechanism, Mirror)
        and layer.mechanism.angles.shape[0]  # not folded before
    }
    if not layers:
        raise ValueError("nothing to fold: the model has no mirror with reflections left in it")
    for name, layer in layers.items():
        layer.mechanism.reflection_matrix()  # type: ignore[operator]  # raises if no matrix stands for the reflection
        if between := _before_reflection(layer):
            raise ValueError(f"{between} stands between the projections of {name} and its reflection")
    for layer in layers.values():
        layer.fold() if isinstance(layer, Attention) else _fold(layer)
    return list(layers)


def _before_reflection(layer: Attention | ConvertedAttention) -> str:
    if isinstance(layer, Attention):
        return "" if layer.options.qk_norm is None else "qk_norm"
    if layer.adapter.rotates:
        return "a rotation by position"
    norm = getattr(layer, "q_norm", None)
    return "" if norm is None or isinstance(norm, nn.Identity) else "a norm of q and k"


@torch.no_grad()
def _fold(layer: Any) -> None:
    mirror = layer.mechanism
    for_q, for_k = mirror.reflection_matrix(), mirror.reflection_matrix(keys=True)
    n, m = for_q.shape[0], for_k.shape[0]
    if getattr(layer, "qkv", None) is not None:
        places = [(layer.qkv, slice(0, n), for_q), (layer.qkv, slice(n, n + m), for_k)]
    else:
        q, k = (layer.q, layer.kv) if getattr(layer, "kv", None) is not None else (layer.q_proj, layer.k_proj)
        places = [(q, slice(0, n), for_q), (k, slice(0, m), for_k)]
    rows = [(own[part], matrix) for p, part, matrix in places for own in (p.weight, p.bias) if own is not None]
    biases = ((getattr(layer, "q_bias", None), for_q), (getattr(layer, "k_bias", None), for_k))
    for own, matrix in rows + [(bias, matrix) for bias, matrix in biases if bias is not None]:
        own.copy_((matrix.double() @ own.double()).to(own))  # kept for good: rounded only once
    layer.mechanism = mirror.without_reflection()
