"""Conversion: replaces attention modules of a model in place, according to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linattn.convert.adapters import find_adapter
from linattn.convert.adapters.base import Adapter, Site
from linattn.convert.layer.attention import LinearizedAttention, linearized_layers
from linattn.convert.layer.core import build_core
from linattn.convert.plan import Plan, plan
from linattn.convert.plan.methods import check_layers


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion: which layers were converted, and why the others were not."""

    plan: Plan
    converted: list[int]
    kept: dict[int, str]
    new_parameters: int


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
    sites = find_adapter(model).sites(model)
    if not any(site.convertible for site in sites):
        reasons = {site.why_not for site in sites}
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {'; '.join(map(str, reasons))}")
    if layers is not None:
        check_layers(layers, len(sites))
    chosen = [site.layer_idx for site in sites if site.convertible] if layers is None else list(layers)
    by_number = {site.layer_idx: site for site in sites}
    for index in chosen:
        if index in by_number:
            _check_convertible(by_number[index])
    return plan(method, [by_number[index].shape for index in sorted(by_number)], layers=chosen, **options)


def check_model(model: nn.Module) -> None:
    """Raise if a model is converted already, or if its config asks for attention weights."""
    if linearized_layers(model):
        raise ValueError("the model is converted already; load it anew to convert it in another way")
    if getattr(getattr(model, "config", None), "output_attentions", False):
        raise ValueError(
            "output_attentions=True in the model's config is not possible: a converted layer has no attention weights "
            "to give; set model.config.output_attentions = False, or output_attentions to false in config.json"
        )


def convert(model: nn.Module, plan: Plan) -> Conversion:
    """Replace the attention of the layers that ``plan`` names, in place.

    The projections stay the same modules under the same names; the only new module is ``core`` beside them, in fp32.
    ``generate``, ``save_pretrained`` and ``state_dict`` of a model of transformers work as before.
    """
    adapter = find_adapter(model)
    check_model(model)
    sites = {site.layer_idx: site for site in adapter.sites(model)}
    missing = plan.layers.keys() - sites.keys()
    if missing:
        raise ValueError(f"the plan names the layers {sorted(missing)}, but the model has {sorted(sites)}")
    for index in plan.layers:
        _check_convertible(sites[index])
    # Every core is built before the first module is replaced: a plan that does not fit leaves the model as it was.
    new = {index: _replacement(model, adapter, sites[index], plan) for index in sorted(plan.layers)}
    for index, module in new.items():
        model.set_submodule(sites[index].name, module)
    _tell_transformers(model, adapter, plan)
    kept = {i: site.why_not or "not named in the plan" for i, site in sites.items() if i not in plan.layers}
    count = sum(p.numel() for module in new.values() for p in module.core.parameters())
    return Conversion(plan, list(new), kept, count)


def _check_convertible(site: Site) -> None:
    if not site.convertible:
        raise ValueError(f"layer {site.layer_idx} ({site.name}) cannot be converted: {site.why_not}")


def _replacement(model: nn.Module, adapter: Adapter, site: Site, plan: Plan) -> LinearizedAttention:
    module = model.get_submodule(site.name)
    weight = next(module.parameters())
    if weight.is_meta and any(hasattr(part, "_hf_hook") for part in module.modules()):
        raise ValueError(
            f"the weights of layer {site.layer_idx} ({site.name}) are offloaded, and what is new would stay empty "
            "beside them: load the model with all of it on devices, without offloading to the cpu or a disk"
        )
    with torch.device(weight.device):
        core = build_core(plan.layers[site.layer_idx], site.shape)
    new = LinearizedAttention(module, core, adapter, site)
    return new.train(module.training)


def _tell_transformers(model: nn.Module, adapter: Adapter, plan: Plan) -> None:
    """Put the plan into the config, which is saved, and set up masks ``(B, T)``, checks of arguments and positions."""
    model.linearize_plan = plan  # type: ignore[assignment]  # for models that have no config
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return
    from linattn.convert.hf.interface import LINEARIZED, register_linearized
    from linattn.convert.hf.positions import count_real_tokens, refuse_packed, refuse_weights

    register_linearized()
    config._attn_implementation = LINEARIZED
    config.linearize = plan.to_dict()
    model._is_stateful = True  # type: ignore[assignment]  # a state cannot go back: no assisted decoding
    inner: Any = getattr(model, "base_model", model)  # this part is called whichever head or wrapper is around it
    for refuse in (refuse_weights, refuse_packed):
        inner.register_forward_pre_hook(refuse, with_kwargs=True)
    if adapter.positions_from_mask:
        inner.register_forward_pre_hook(count_real_tokens, with_kwargs=True)
