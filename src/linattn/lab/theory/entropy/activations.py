"""Queries and keys to be examined: random ones, and those inside a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.capture import capture
from linattn.lab.theory.entropy.settings import EntropyConfig
from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.rotation import Rotate

SPREAD = 0.7  # standard deviation of the log-length of random queries: one in twenty is 4 times as long as the median


@dataclass(frozen=True)
class Activations:
    """q ``(B, H, T, D)``, k ``(B, H_kv, T, D)`` and the layer's input x ``(B, T, C)``, in fp64.

    ``own`` is the mechanism that was called with them, as it was trained; None if there is none.
    """

    source: str
    layer: str
    q: Tensor
    k: Tensor
    x: Tensor | None = None
    causal: bool = False
    spatial_shape: tuple[int, int] | None = None
    rotate: Rotate | None = None
    own: Mechanism | None = None

    def times(self, scale: float) -> "Activations":
        """The same activations with all queries multiplied by ``scale``."""
        return replace(self, q=scale * self.q)

    def map_arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``attention_map``."""
        return {"spatial_shape": self.spatial_shape, "x": self.x, "rotate": self.rotate}


def random_activations(config: EntropyConfig) -> Activations:
    """Normal keys, and queries in random directions whose lengths are log-normal around ``sqrt(D)``."""
    B, H, T, D = config.batch, config.heads, config.tokens, config.head_dim
    generator = torch.Generator().manual_seed(config.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, x = draw(B, H, T, D), draw(B, H, T, D), draw(B, T, H * D)
    q = D**0.5 * q / q.norm(dim=-1, keepdim=True) * (SPREAD * draw(B, H, T, 1)).exp()
    q, k, x = (t.to(config.device) for t in (q, k, x))
    return Activations("random", "random", q, k, x)


def captured_activations(model: nn.Module, inputs: Tensor, source: str) -> list[Activations]:
    """What the mechanisms of ``model`` are called with, layer by layer, with the inputs of the layers around them."""
    with _inputs_of_layers(model) as read:
        calls = capture(model, inputs)
    found = []
    for call in calls:
        arguments = call.map_arguments()
        x = arguments["x"] if arguments["x"] is not None else read.get(call.name)
        if x is not None and x.shape[:2] != (call.k.shape[0], call.k.shape[2]):
            x = None  # keys of a reduced plane: there is no input for gates per key
        found.append(
            Activations(
                source, call.name.removesuffix(".mechanism"), call.q.double(), call.k.double(),
                None if x is None else x.double(), call.mechanism.causal, arguments["spatial_shape"],
                arguments["rotate"], call.mechanism,
            )
        )  # fmt: skip
    return found


@contextmanager
def _inputs_of_layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the input of every layer that holds a mechanism, by the name that ``capture`` gives to its calls."""
    found: dict[str, Tensor] = {}

    def hook_of(names: tuple[str, str]) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("x")
            if isinstance(x, Tensor):
                found.update(dict.fromkeys(names, x.detach()))

        return hook

    handles = []
    for name, module in model.named_modules():
        if isinstance(getattr(module, "mechanism", None), Mechanism):
            hook = hook_of((name, f"{name}.mechanism"))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
