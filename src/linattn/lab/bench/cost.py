"""What a model costs: parameters, arithmetic and state, in the same units for every mechanism.

Costs are counted in one forward pass of one image. Matrix products and convolutions outside of mechanisms are counted
as PyTorch runs them; a mechanism reports its own count, ``mechanism.flops(T)``, as its operators cannot be seen from
outside. What PyTorch counted while a mechanism ran is subtracted, so that nothing counts twice. A multiplication with
its addition counts as 2; biases, norms and activations are not counted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from linattn.mechanisms.base import Mechanism
from linattn.models.vision.patches import pair


@dataclass(frozen=True)
class ModelCost:
    """Cost of one model; flops and state are those of one image."""

    parameters: int
    mechanism_parameters: int  # of these, those inside mechanisms
    flops: int  # of the whole forward pass
    attention_flops: int  # of these, what the mechanisms report; the projections around them are not in it
    state_size: int | None  # numbers kept per layer, the largest if they differ; None: some mechanism has no state


def model_cost(model: nn.Module, image_size: int | tuple[int, int], channels: int) -> ModelCost:
    """Count parameters, flops and state of ``model`` at images ``(channels, *image_size)``, in evaluation mode.

    Example:
        >>> from linattn.models.vision import create_vit
        >>> cost = model_cost(create_vit("digits", "relu"), 8, 1)
        >>> cost.mechanism_parameters, cost.state_size  # 3 heads, 16 features, 16 values and the denominator
        (0, 816)
    """
    model = getattr(model, "_orig_mod", model)  # compiled code runs no hooks
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    weight = next(model.parameters())
    image = torch.zeros(1, channels, *pair("image_size", image_size), device=weight.device, dtype=weight.dtype)
    counter = FlopCounterMode(display=False)
    calls: list[tuple[Mechanism, int]] = []
    seen = [0]

    def enter(mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip("qkv", args, strict=False)) | kwargs
        queries, keys = named["q"].shape[2], named["k"].shape[2]
        if queries != keys:
            raise ValueError(f"a mechanism tells its flops for as many keys as queries, got {keys} and {queries}")
        calls.append((mechanism, queries))
        seen.append(-counter.get_total_flops())

    hooks: list[Any] = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in mechanisms]
    hooks += [m.register_forward_hook(lambda *_: seen.append(counter.get_total_flops())) for m in mechanisms]
    try:
        with torch.random.fork_rng(), torch.no_grad(), counter:
            model.eval()(image)
    finally:
        for hook in hooks:
            hook.remove()
    attention_flops = sum(mechanism.flops(length) for mechanism, length in calls)
    inside = {id(p): p.numel() for mechanism in mechanisms for p in mechanism.parameters()}
    has_state = calls and all(mechanism.info.state != "none" for mechanism, _ in calls)
    return ModelCost(
        parameters=sum(p.numel() for p in model.parameters()),
        mechanism_parameters=sum(inside.values()),
        flops=counter.get_total_flops() - sum(seen) + attention_flops,
        attention_flops=attention_flops,
        state_size=max(mechanism.state_size(length) for mechanism, length in calls) if has_state else None,
    )
