"""Conversion: replaces attention modules of a model in place, according to a plan, by what shows itself to learners."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.convert.adapters.families import Adapter, Site, convertible_sites, find_adapter
from linattn.convert.core import Core, build_core
from linattn.convert.plan import Plan, plan
from linattn.ops.hybrid.decoding import NEWEST_REAL
from linattn.support.offloading import is_offloaded, weights_here

Mode = Literal["student", "teacher", "transfer"]
# Arguments that say several texts share a row: those of transformers' collators and of this library's models.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "cu_seqlens")


class Observation(NamedTuple):
    """What one layer sees in transfer mode, without gradients.

    q ``(B, H, T, D)`` is scaled so that the model's logits are ``q . k / sqrt(D)``, whatever factor it uses itself; k
    and v are ``(B, H_kv, T, D)``; x ``(B, T, hidden)`` is the layer's input; key_mask is ``(B, T)`` or None; output
    ``(B, H, T, D)`` is the exact softmax attention before the output projection.
    """

    layer_idx: int
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    key_mask: Tensor | None
    output: Tensor


Observer = Callable[[Observation], None]


class ReplacedAttention(nn.Module):
    """An attention module with the old one's projections and attributes, under their names.

    A subclass adds what takes the place of softmax.
    """

    adapter: Adapter

    def __init__(self, old: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        # Plain attributes are those that a bare module does not have, and accelerate does not add around its forward.
        left = vars(nn.Module()).keys() | {"forward", "_old_forward", "_hf_hook"}
        plain = {name: value for name, value in vars(old).items() if name not in left}
        for name, value in (plain | old._parameters | old._modules).items():
            setattr(self, name, value)
        for name, buffer in old._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
        self.adapter, self.training = adapter, old.training


class LinearizedAttention(ReplacedAttention):
    """An attention module whose ``core`` takes the place of softmax; its projections are as they were.

    ``mode`` is ``"student"``, the converted layer; ``"teacher"``, exact softmax as before the conversion; or
    ``"transfer"``, as teacher but without gradients, where ``observe`` is called with an :class:`Observation`.
    """

    def __init__(self, module: nn.Module, core: Core, adapter: Adapter, site: Site) -> None:
        super().__init__(module, adapter)
        self.core, self.shape, self.layer_idx = core.train(module.training), site.shape, site.layer_idx
        self.mode: Mode = "student"
        self.observe: Observer | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode != "transfer"):
            x, named = self.adapter.hidden(args, kwargs)
            packed = [name for name in PACKED if named.get(name) is not None]
            if packed:
                raise ValueError(
                    f"converted layers do not know packed sequences, and {packed[0]} tells of some: give each text a "
                    "row of its own with attention_mask"
                )
            q, k, v = self.adapter.project(self, x, **named)
            factor = self.adapter.scale(self) * self.shape.head_dim**0.5
            q = q if abs(factor - 1) < 1e-9 else q * factor
            key_mask, cache = self.adapter.key_mask(**named), named.get("past_key_values", named.get("layer_past"))
            cache = getattr(cache, "self_attention_cache", cache)  # a decoder with an encoder has two caches
            if self.mode != "student":
                out = self._teacher(q, k, v, x, key_mask, cache)
            else:
                with weights_here(self.core) if is_offloaded(self.core) else nullcontext():
                    out = self._student(q, k, v, x, key_mask, cache)
            return self.adapter.merge(self, out, **named)

    def _student(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_mask: Tensor | None, cache: Any) -> Tensor:
        newest_real = getattr(key_mask, NEWEST_REAL, False)
        if key_mask is not None:
            key_mask = key_mask[:, -k.shape[2] :]
        if cache is None:
            return self.core(q, k, v, x=x, key_mask=key_mask)
        from linattn.convert.hf.converted import core_layer

        layer = core_layer(cache, self.layer_idx, masked=key_mask is not None)
        if k.shape[2] == 1 and (key_mask is None or newest_real):
            out, state = self.core.decode(q, k, v, layer.held, x=x)
        else:
            out, state = self.core.with_state(q, k, v, state=layer.state, x=x, key_mask=key_mask)
        layer.held, layer.length = state, layer.length + k.shape[2]
        if not newest_real:
            layer.note_padding(key_mask)
        return out

    def _teacher(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_mask: Tensor | None, cache: Any) -> Tensor:
        own = k, v
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out = exact_attention(q, k, v, key_mask, causal=self.shape.causal)
        if self.mode == "transfer" and self.observe is not None:
            mask = None if key_mask is None else key_mask[:, -own[0].shape[2] :]
            with torch.enable_grad():  # observers may learn from what they see
                self.observe(Observation(self.layer_idx, q, *own, x.detach(), mask, out))
        return out


def exact_attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """Softmax attention with the logits ``q . k / sqrt(D)``; the last query belongs to the last key."""
    Tq, Tk = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
    if key_mask is None and (not causal or Tq == Tk or Tq == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and Tq > 1, **options)
    visible = torch.ones(1, 1, Tq, Tk, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(Tk - Tq)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, -Tk:]
    # Softmax over nothing is NaN: a row without visible keys, which only padding has, may see everything.
    visible = visible | ~visible.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, visible, **options)


def linearized_layers(model: nn.Module) -> dict[int, LinearizedAttention]:
    """The converted layers of a model, by their number."""
    found = [module for module in model.modules() if isinstance(module, LinearizedAttention)]
    return {module.layer_idx: module for module in sorted(found, key=lambda module: module.layer_idx)}


def set_mode(model: nn.Module, mode: Literal["student", "teacher"]) -> None:
    """Put all converted layers into a mode; for ``"transfer"`` use :func:`observing`."""
    for layer in linearized_layers(model).values():
        layer.mode = mode


@contextmanager
def observing(model: nn.Module, observe: Observer) -> Iterator[None]:
    """Put all converted layers into transfer mode with the callback ``observe``; on exit they are as they were.

    Example:
        >>> def show(seen):
        ...     print(seen.layer_idx, seen.q.shape)
        >>> # with observing(model, show): model(ids)
    """
    before = [(layer, layer.mode, layer.observe) for layer in linearized_layers(model).values()]
    try:
        for layer, _, _ in before:
            layer.mode, layer.observe = "transfer", observe
        yield
    finally:
        for layer, mode, own in before:
            layer.mode, layer.observe = mode, own


def plan_model(model: nn.Module, method: str, *, layers: Sequence[int] | None = None, **options: Any) -> Plan:
    """Make a :class:`linattn.convert.plan.Plan` for a model; ``layers`` None: all layers that can be converted.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from linattn.convert.convert import plan_model
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> sorted(plan_model(LlamaForCausalLM(config), "still", window=16).layers)
        [0, 1]
    """
    found, sites = convertible_sites(model), find_adapter(model).sites(model)
    made = plan(method, [site.shape for site in sites], layers=list(found) if layers is None else layers, **options)
    for index in made.layers:
        _check_convertible(sites[index])
    return made


def check_model(model: nn.Module) -> None:
    """Raise if a model is converted already, or if its config asks for attention weights."""
    if linearized_layers(model):
        raise ValueError("the model is converted already; load it anew to convert it in another way")
    if getattr(getattr(model, "config", None), "output_attentions", False):
        raise ValueError(
            "output_attentions=True in the model's config is not possible: a converted layer has no attention weights "
            "to give; set model.config.output_attentions = False, or output_attentions to false in config.json"
        )


def convert(model: nn.Module, plan: Plan) -> dict[int, str]:
    """Replace the attention of the layers that ``plan`` names, in place; returns why the others stay, by number.

    The projections stay the same modules under the same names; the only new module is ``core`` beside them, in fp32.
    ``generate``, ``save_pretrained`` and ``state_dict`` of a model of transformers work as before.
    """
    check_model(model)
    adapter = find_adapter(model)
    sites = {site.layer_idx: site for site in adapter.sites(model)}
    if missing := plan.layers.keys() - sites.keys():
        raise ValueError(f"the plan names the layers {sorted(missing)}, but the model has {sorted(sites)}")
    # Every core is built before the first module is replaced: a plan that does not fit leaves the model as it was.
    new = {index: _replacement(model, adapter, sites[index], plan) for index in sorted(plan.layers)}
    for index, module in new.items():
        model.set_submodule(sites[index].name, module)
    model.linearize_plan = plan  # type: ignore[assignment]  # for models that have no config
    if hasattr(getattr(model, "config", None), "model_type"):
        from linattn.convert.hf.converted import tell_transformers

        tell_transformers(model, plan.to_dict(), positions_from_mask=adapter.rotary)
    return {i: site.why_not or "not named in the plan" for i, site in sites.items() if i not in new}


def _check_convertible(site: Site) -> None:
    if site.why_not is not None:
        raise ValueError(f"layer {site.layer_idx} ({site.name}) cannot be converted: {site.why_not}")


def _replacement(model: nn.Module, adapter: Adapter, site: Site, plan: Plan) -> LinearizedAttention:
    _check_convertible(site)
    module = model.get_submodule(site.name)
    weight = next(module.parameters())
    if weight.is_meta and any(hasattr(part, "_hf_hook") for part in module.modules()):
        raise ValueError(
            f"the weights of layer {site.layer_idx} ({site.name}) are offloaded, and what is new would stay empty "
            "beside them: load the model with all of it on devices, without offloading to the cpu or a disk"
        )
    with torch.device(weight.device):
        core = build_core(plan.layers[site.layer_idx], site.shape)
    return LinearizedAttention(module, core, adapter, site)
