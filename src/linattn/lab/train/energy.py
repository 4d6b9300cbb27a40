"""The energy that mechanisms cut off, as an additional loss in training."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linattn.support.options import OptionError


def check_energy(weight: float, among: Iterable[object]) -> None:
    """Raise an OptionError if ``weight`` is not 0 and none of the mechanisms or modules ``among`` has an energy loss.

    Example:
        >>> from linattn.models.vision import create_vit
        >>> check_energy(0.1, create_vit("digits", "mirror").modules())
    """
    if weight and not any(hasattr(each, "energy_loss") for each in among):
        needed = "needs a mechanism that reports the energy it cuts off, such as mirror; for others it must be 0"
        raise OptionError("energy_loss", f"{needed}, got {weight:g}")


class EnergyLoss:
    """The mean of ``energy_loss(q, k)`` over all mechanisms of a model that have one, such as ``mirror``.

    It is collected in each forward pass in training; :meth:`take` returns that of the last pass, once.

    Example:
        >>> from linattn.models.vision import create_vit
        >>> model = create_vit("digits", "mirror")
        >>> energy, _ = EnergyLoss(model), model(torch.randn(2, 1, 8, 8))
        >>> loss = energy.take()
        >>> 0 < loss.item() < 1, loss.requires_grad
        (True, True)
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: list[Tensor] = []
        having = [module for module in model.modules() if hasattr(module, "energy_loss")]
        self._hooks = [module.register_forward_pre_hook(self._add, with_kwargs=True) for module in having]
        # With gradient checkpointing the backward pass runs blocks again, which adds losses that are never taken.
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self._found.clear()))

    def take(self) -> Tensor | float:
        """Return the loss and forget it; 0 if no mechanism has one."""
        found, self._found[:] = self._found[:], []
        return torch.stack(found).mean() if found else 0.0

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, mechanism: Any, inputs: tuple[Tensor, ...], options: Mapping[str, Any]) -> None:
        if mechanism.training and torch.is_grad_enabled():
            given = {name: options.get(name) for name in ("key_mask", "cu_seqlens")}
            self._found.append(mechanism.energy_loss(*inputs[:2], **given))
