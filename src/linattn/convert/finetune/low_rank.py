"""Low-rank adapters on a converted model, through peft: added, switched off for the teacher, merged or removed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.layer.attention import linearized_layers, set_mode
from linattn.convert.training.setting import in_fp32
from linattn.support.options import OptionError


class Adapted:
    """A converted model with adapters in its projections, which can also run as the teacher that it was.

    Args:
        rank, alpha: of the adapters, whose output is scaled by ``alpha / rank``.
        targets: last parts of the names of projections, anywhere in the model; None: those of the converted attention.
        train_cores: train the cores too.
        seed: for the random start of one factor of each adapter; the other starts at 0.
    """

    def __init__(
        self, model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str] | None, train_cores: bool, seed: int
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_names(model, targets), lora_dropout=0.0)  # type: ignore[arg-type]
        self.model, self.merged = model, False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.peft: Any = get_peft_model(model, config)
        self._adapters: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        if train_cores:
            for layer in linearized_layers(model).values():
                in_fp32(layer.core).requires_grad_(True)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def as_teacher(self) -> Iterator[None]:
        # Layer by layer: peft's own way searches the whole model first, which takes longer than a layer's pass.
        set_mode(self.model, "teacher")
        self._enable(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self._enable(True)
            set_mode(self.model, "student")

    def _enable(self, enabled: bool) -> None:
        for adapter in self._adapters:
            adapter.enable_adapters(enabled)

    def merge(self) -> None:
        self.peft.merge_and_unload()
        self.merged = True

    def remove(self) -> None:
        self.peft.unload()


@contextmanager
def adapted_model(model: nn.Module, **options: Any) -> Iterator[Adapted]:
    """:class:`Adapted` with these options. On exit its adapters are gone: merged, or else the model is as before."""
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    cores = {number: _copy(layer.core) for number, layer in linearized_layers(model).items()}
    adapted = Adapted(model, **options)
    try:
        yield adapted
    finally:
        if not adapted.merged:
            adapted.remove()
            for number, layer in linearized_layers(model).items():
                layer.core.load_state_dict(cores[number])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted[name])
            parameter.grad = None


def target_names(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Dotted paths of the projections that get adapters; the maps inside a core never do."""
    layers = linearized_layers(model)
    inside = tuple(f"{name}." for name, module in model.named_modules() if module in layers.values())
    last = next(iter(layers.values())).adapter.lora_targets if targets is None else targets
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last and ".core." not in name]
    names = [name for name in names if targets is not None or name.startswith(inside)]
    if not names:
        wanted = ", ".join(last) or "projections to adapt by default"
        raise OptionError("targets", f"must be names of the model's projections; it has no {wanted}")
    return names


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
