"""Observes attention inside a model: which form serves each call, and what is computed outside of kernels."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.lab.bench.choices import watch_choices
from linattn.lab.bench.models.cases import SOFTMAX
from linattn.lab.bench.models.hosts import Host
from linattn.mechanisms.base import Mechanism

OURS = "linattn"


class Look:
    """``explain``: forms with their numbers of calls; ``beside``: large operations outside of kernels, by name.

    ``linear``: how many mechanisms of the model are not softmax; each of them makes equally many calls.
    """

    def __init__(self, explain: dict[str, int], beside: dict[str, int], on_kernels: bool | None, linear: int) -> None:
        self.explain, self.beside, self.on_kernels, self.linear = explain, beside, on_kernels, linear

    def calls_of(self, host: Host) -> int:
        """Number of calls of linear attention in a deeper model of the same kind."""
        return sum(self.explain.values()) * len(linear_parts(host)) // self.linear if self.linear else 0


def linear_parts(host: Host) -> list[Mechanism]:
    return [m for m in host.modules() if isinstance(m, Mechanism) and m.info.name != SOFTMAX]


def look_at(host: Host, mechanism: str, inputs: Tensor, targets: Tensor, autocast: bool) -> Look:
    """Observe every call of attention in one forward pass without compilation."""
    modules = [module for module in host.modules() if isinstance(module, Mechanism)]
    watch = _Watch()
    hooks = [m.register_forward_pre_hook(watch.enter, with_kwargs=True) for m in modules]
    hooks += [m.register_forward_hook(watch.leave) for m in modules]
    try:
        with (
            torch.no_grad(), torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast),
            watch_choices() as choices, watch,
        ):  # fmt: skip
            host(inputs, targets)
    finally:
        for hook in hooks:
            hook.remove()
    if mechanism == SOFTMAX:
        return Look({"scaled_dot_product_attention: softmax is PyTorch's": len(modules)}, dict(watch.beside), None, 0)
    linear = len(linear_parts(host))  # a backbone's last stages are softmax
    served = len(choices) >= linear and all(choice.impl == "triton" for choice in choices)
    return Look(dict(Counter(map(str, choices))), dict(watch.beside), served, linear)


class _Watch(TorchDispatchMode):
    """Counts operations inside mechanisms on tensors as large as their queries, except views and our own kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.large: int | None = None  # numbers of q; None: outside
        self.beside: Counter[str] = Counter()

    def enter(self, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.large = (args[0] if args else kwargs["q"]).numel()

    def leave(self, mechanism: Mechanism, args: tuple[Any, ...], output: Tensor) -> None:
        self.large = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.large is not None and func.namespace != OURS and "scaled_dot_product" not in str(func):
            known = {t.untyped_storage().data_ptr() for t in _tensors((*args, *(kwargs or {}).values()))}
            fresh = [t for t in _tensors((output,)) if t.untyped_storage().data_ptr() not in known]
            if any(t.numel() >= self.large for t in fresh) and "empty" not in func.__name__:
                self.beside[str(func._overloadpacket)] += 1
        return output


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
