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
from linattn.convert.plan import Plan, check_layers, plan


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
    sites = {site.layer_idx: site for site in find_adapter(model).sites(model)}
    if not any(site.convertible for site in sites.values()):
        reasons = {str(site.why_not) for site in sites.values()}
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {'; '.join(sorted(reasons))}")
    if layers is None:
        layers = [index for index, site in sites.items() if site.convertible]
    check_layers(layers, len(sites))
    for index in layers:
        _check_convertible(sites[index])
    return plan(method, [sites[index].shape for index in sorted(sites)], layers=layers, **options)


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
    model.linearize_plan = plan  # type: ignore[assignment]  # for models that have no config
    if hasattr(getattr(model, "config", None), "model_type"):
        from linattn.convert.hf.hooks import tell_transformers

        tell_transformers(model, plan.to_dict(), positions_from_mask=adapter.positions_from_mask)
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
    return LinearizedAttention(module, core, adapter, site)
