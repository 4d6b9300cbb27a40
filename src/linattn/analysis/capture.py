"""Records what the mechanisms of a model are called with on real images."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn.layers.attention import Attention
from linattn.mechanisms.base import Mechanism


@dataclass(frozen=True)
class CapturedCall:
    """One call of a mechanism: its arguments, and where the tokens are in the image.

    ``name`` is that of the ``Attention`` layer in the model, or of the mechanism itself if it is not inside one.
    ``inputs`` are that layer's; ``grid`` and ``key_grid`` are the planes (rows, columns) of queries and keys. They are
    None if they were not passed to a layer.
    """

    name: str
    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]
    inputs: Tensor | None
    grid: tuple[int, int] | None
    key_grid: tuple[int, int] | None

    def map_arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``attention_map`` and ``attention_row``."""
        for name in ("key_mask", "cu_seqlens"):
            if self.kwargs.get(name) is not None:
                raise ValueError(f"{self.name} was called with {name}: padded or packed tokens have no single map")
        return {name: self.kwargs.get(name) for name in ("spatial_shape", "x", "rotate")}


def capture(model: nn.Module, images: Tensor) -> list[CapturedCall]:
    """Run the model once, in eval mode and without gradients, and return every call of a mechanism, in order.

    Compiled models and blocks run uncompiled (``torch.compiler.set_stance("force_eager")``), since compiled code skips
    hooks. Hooks are removed and the modes of all modules restored, even if the model raises.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_vit
        >>> model = create_vit("digits", "relu")
        >>> calls = capture(model, torch.randn(2, 1, 8, 8))
        >>> [call.name for call in calls], calls[0].q.shape, calls[0].grid
        (['blocks.0.attn', 'blocks.1.attn', 'blocks.2.attn'], torch.Size([2, 3, 17, 16]), (4, 4))
    """
    calls: list[CapturedCall] = []
    entered: dict[str, Any] = {}  # input and plane of the call that a layer is in
    layers = {id(m.mechanism): (name, m) for name, m in model.named_modules() if isinstance(m, Attention)}

    def enter(own: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, layer = layers.get(id(module), (own, None))
        if not isinstance(module, Mechanism):
            entered[name] = (args[0] if args else kwargs["x"]).detach(), kwargs.get("spatial_shape")
            return
        given = dict(zip(("q", "k", "v"), args, strict=False)) | kwargs
        given = {key: value.detach() if isinstance(value, Tensor) else value for key, value in given.items()}
        q, k, v = (given.pop(key) for key in ("q", "k", "v"))
        inputs, grid = entered.get(name, (None, None))
        key_grid = grid
        if grid is not None and layer is not None and layer.reduction is not None:
            key_grid = layer.reduction.reduced_shape(grid)
        # Without the wrappers that torch.compile adds.
        plain = ".".join(part for part in name.split(".") if part != "_orig_mod")
        calls.append(CapturedCall(plain, module, q, k, v, given, inputs, grid, key_grid))

    # Each has its own mode again afterwards, as parts of a model may have been frozen.
    modes = [(module, module.training) for module in model.modules()]
    handles = [
        module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, Attention | Mechanism)
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    if not calls:
        raise ValueError(f"{type(model).__name__} called no linattn mechanism, so there is no attention to look at")
    return calls
