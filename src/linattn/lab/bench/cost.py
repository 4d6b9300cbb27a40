"""What a model costs: parameters, arithmetic, state, speed and memory, in the same units for every mechanism.

Costs are counted in one forward pass of one image. Matrix products and convolutions outside of mechanisms are counted
as PyTorch runs them; a mechanism reports its own count, ``mechanism.flops(T)``, as its operators cannot be seen from
outside. What PyTorch counted while a mechanism ran is subtracted, so that nothing counts twice. A multiplication with
its addition counts as 2; biases, norms and activations are not counted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from linattn.ops.shared.call import check_choice

Precision = Literal["fp32", "bf16"]
MIN_REPEATS = 3


@dataclass(frozen=True)
class ModelCost:
    """Cost of one model; flops and state are those of one image."""

    parameters: int
    mechanism_parameters: int  # of these, those inside mechanisms
    flops: int  # of the whole forward pass
    attention_flops: int  # of these, what the mechanisms report; the projections around them are not in it
    state_size: int | None  # numbers kept per layer, the largest if they differ; None: some mechanism has no state


def model_cost(model: nn.Module, image_size: int | tuple[int, int], channels: int) -> ModelCost:
    """Count parameters, flops and state of ``model`` at images ``(channels, *image_size)``.

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
    watch = _Watch(counter)
    hooks = [m.register_forward_pre_hook(watch.enter, with_kwargs=True) for m in mechanisms]
    hooks += [m.register_forward_hook(watch.leave) for m in mechanisms]
    try:
        with _undisturbed(model, training=False), torch.no_grad(), counter:
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
    attention_flops = sum(mechanism.flops(length) for mechanism, length in watch.calls)
    inside = {id(p): p.numel() for mechanism in mechanisms for p in mechanism.parameters()}
    return ModelCost(
        parameters=sum(p.numel() for p in model.parameters()),
        mechanism_parameters=sum(inside.values()),
        flops=counter.get_total_flops() - watch.seen + attention_flops,
        attention_flops=attention_flops,
        state_size=_state_size(watch.calls),
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
    make = _training_step if training else _forward
    calls = {name: make(model, images, precision) for name, model in models.items()}
    with _undisturbed(*models.values(), training=training):
        timings = measure_in_turns(calls, images.device, min_seconds=min_seconds, min_repeats=MIN_REPEATS)
    return {name: images.shape[0] / timing.median for name, timing in timings.items()}


def train_peak_bytes(model: nn.Module, images: Tensor, precision: Precision = "fp32") -> int:
    """The most that forward, loss and backward over ``images`` allocate at one time.

    Activations, temporaries and the gradients of all parameters count; parameters and images, which exist before, do
    not, and neither do states of an optimiser.
    """
    call = _training_step(model, images, precision)
    with _undisturbed(model, training=True):
        if images.is_cuda:
            call()  # in the first pass libraries allocate workspaces that stay, which are not the model's
        return peak_bytes(call, images.device)


class _Watch:
    """Watches mechanisms run: at which length, and what the counter counted meanwhile."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter, self.seen = counter, 0
        self.calls: list[tuple[Mechanism, int]] = []

    def enter(self, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip("qkv", args, strict=False)) | kwargs
        queries, keys = named["q"].shape[2], named["k"].shape[2]
        if queries != keys:
            raise ValueError(f"a mechanism tells its flops for as many keys as queries, got {keys} and {queries}")
        self.calls.append((mechanism, queries))
        self.seen -= self.counter.get_total_flops()

    def leave(self, mechanism: Mechanism, args: tuple[Any, ...], output: Tensor) -> None:
        self.seen += self.counter.get_total_flops()


def _state_size(calls: list[tuple[Mechanism, int]]) -> int | None:
    if not calls or any(mechanism.info.state == "none" for mechanism, _ in calls):
        return None
    return max(mechanism.state_size(length) for mechanism, length in calls)


def _forward(model: nn.Module, images: Tensor, precision: str) -> Callable[[], object]:
    autocast = _autocast(precision, images.device)

    def call() -> object:
        with torch.no_grad(), autocast():
            return model(images)

    return call


def _training_step(model: nn.Module, images: Tensor, precision: str) -> Callable[[], object]:
    """Gradients are returned, not stored, so that those of a training loop in ``.grad`` stay as they are."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    autocast = _autocast(precision, images.device)

    def call() -> object:
        with autocast():
            logits = model(images)
            labels = torch.arange(logits.shape[0], device=logits.device) % logits.shape[1]
            loss = F.cross_entropy(logits, labels)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return call


def _autocast(precision: str, device: torch.device) -> Callable[[], torch.autocast]:
    check_choice("precision", precision, ("fp32", "bf16"))
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def _undisturbed(*models: nn.Module, training: bool) -> Iterator[None]:
    """Put models into a mode; on exit modes, buffers (running means) and random numbers are as they were."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    devices = {p.device.index or 0 for model in models for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            for model in models:
                model.train(training)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
