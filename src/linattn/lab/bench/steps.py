"""A training step of a model: how it is run, and checked against the same model with plain attention."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench.benchmark import SOFTMAX, Row
from linattn.lab.bench.check import Verdict, by_kind, distances, judge, watch_choices
from linattn.lab.bench.hosts import Host
from linattn.mechanisms.base import Mechanism

Batch = tuple[Tensor, Tensor]
Step = Callable[[], tuple[Tensor | None, ...]]


def softmax_kernels(*, flash_alone: bool = False) -> AbstractContextManager[object]:
    """Let PyTorch's flash kernel serve softmax, or the next that can; never cuDNN's, which plans every new length.

    ``flash_alone``: no other kernel may take its place unnoticed.
    """
    others = [] if flash_alone else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, *others], set_priority=True)


def make_step(host: Host, batch: Batch, autocast: bool, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Forward, loss and backward; loss and gradients of all parameters are returned, not stored.

    With an optimiser its step follows, and the loss alone is returned.
    """
    parameters, device_type = list(host.parameters()), batch[0].device.type

    def step() -> tuple[Tensor | None, ...]:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=autocast):
            loss = host(*batch)
        if optimizer is None:
            return loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def forms(host: Host, mechanism: str, batch: Batch, autocast: bool) -> Row:
    """Which form serves each call of attention in a forward pass without compilation, and whether all are kernels."""
    bf16 = torch.autocast(batch[0].device.type, dtype=torch.bfloat16, enabled=autocast)
    with torch.no_grad(), bf16, watch_choices() as choices:
        host(*batch)
    modules = [module for module in host.modules() if isinstance(module, Mechanism)]
    if mechanism == SOFTMAX:
        return {"explain": {"scaled_dot_product_attention: softmax is PyTorch's": len(modules)}, "on_kernels": None}
    linear = sum(module.info.name != SOFTMAX for module in modules)  # a backbone's last stages are softmax
    served = len(choices) >= linear and all(choice.impl == "triton" for choice in choices)
    return {"explain": dict(Counter(map(str, choices))), "on_kernels": served}


class StepTruth:
    """Loss and gradients of the same model with attention in plain PyTorch, in fp64 or another ``exact`` precision.

    ``err <= 2 (err(plain) + eps)``, with plain that model in the precision that is measured. Errors are norms of
    differences over the norm of the exact values, by kind of parameter and for all blocks together.

    Args:
        host: the model with a form of its mechanism in plain PyTorch; it is converted to the exact precision.
    """

    def __init__(
        self, host: Host, batch: Batch, autocast: bool, words: str, exact: torch.dtype = torch.float64
    ) -> None:
        self.batch, self.autocast, self.against = batch, autocast, f"fp{torch.finfo(exact).bits}, {words}"
        with softmax_kernels():
            plain = by_kind(host, make_step(host, batch, autocast)())
            host.to(exact)
            wide = [x.to(exact) if x.is_floating_point() else x for x in batch]
            # cuDNN rounds to tf32 and takes seconds for its plans for every new shape.
            with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
                self.exact = by_kind(host, make_step(host, (wide[0], wide[1]), False)())
        self.plain = distances(plain, self.exact)
        self.eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps

    def check(self, host: Host) -> Verdict:
        found = by_kind(host, make_step(host, self.batch, self.autocast)())
        return judge(distances(found, self.exact), self.plain, self.eps, self.against)
