"""What a model costs: parameters, arithmetic, state, speed and memory, in the same units for every mechanism.

Costs are counted in one forward pass of one image. Matrix products and convolutions outside of mechanisms are counted
as PyTorch runs them; a mechanism reports its own count, ``mechanism.flops(T)``, as its operators cannot be seen from
outside. What PyTorch counted while a mechanism ran is subtracted, so that nothing counts twice. A multiplication with
its addition counts as 2; biases, norms and activations are not counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import measure_in_turns
from linattn.mechanisms.base import Mechanism
from linattn.models.vision.patches import pair

Precision = Literal["fp32", "bf16"]


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


def throughput_in_turns(
    models: Mapping[str, nn.Module],
    images: Tensor,
    *,
    training: bool,
    precision: Precision = "fp32",
    min_seconds: float = 0.5,
) -> dict[str, float]:
    """Images per second of several models, one pass of each over ``images (B, C, H, W)`` per round.

    So a busy moment affects all alike; the median of several rounds counts. ``training``: forward, loss and backward,
    without the optimiser's step; else forward alone, in evaluation mode. ``precision="bf16"``: autocast around the
    weights as they are.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_vit
        >>> models = {name: create_vit("digits", name) for name in ("softmax", "relu")}
        >>> sorted(throughput_in_turns(models, torch.randn(2, 1, 8, 8), training=False, min_seconds=0))
        ['relu', 'softmax']
    """
    calls = {name: _pass(model, images, precision, training) for name, model in models.items()}
    with torch.random.fork_rng():
        timings = measure_in_turns(calls, images.device, min_seconds=min_seconds, min_repeats=3)
    return {name: images.shape[0] / timing.median for name, timing in timings.items()}


def train_peak_bytes(model: nn.Module, images: Tensor, precision: Precision = "fp32") -> int:
    """The most that forward, loss and backward over ``images`` allocate at one time.

    Activations, temporaries and the gradients of all parameters count; parameters and images, which exist before, do
    not, and neither do states of an optimiser.
    """
    call = _pass(model, images, precision, training=True)
    with torch.random.fork_rng():
        if images.is_cuda:
            call()  # in the first pass libraries allocate workspaces that stay, which are not the model's
        return peak_bytes(call, images.device)


def _pass(model: nn.Module, images: Tensor, precision: Precision, training: bool) -> Callable[[], object]:
    """Put the model into its mode; gradients are returned, not stored."""
    model.train(training)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def call() -> object:
        autocast = torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
        with torch.set_grad_enabled(training), autocast:
            logits = model(images)
            if not training:
                return logits
            labels = torch.arange(logits.shape[0], device=logits.device) % logits.shape[1]
            loss = F.cross_entropy(logits, labels)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return call
