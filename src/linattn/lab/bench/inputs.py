"""The tensors that a benchmark feeds to all contenders alike."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.bench.settings import BenchConfig
from linattn.ops.maps import EluPlusOne


@dataclass(frozen=True)
class Inputs:
    """``q, k, v (B, H, T, D)``, a log_decay if one was asked for, and ``x (B, T, H D)`` for gates.

    ``phi_q, phi_k`` are the features ``elu + 1`` of q and k, from which the forms of linear attention start. Computing
    them is not part of a form and is not timed with one; the mechanism ``elu`` times both.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    x: Tensor
    phi_q: Tensor
    phi_k: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Inputs":
        return replace(self, **{name: change(name, t) for name, t in self.tensors().items()})

    def to(self, dtype: torch.dtype) -> "Inputs":
        return self.map(lambda _, t: t.to(dtype))

    def copies(self, requires_grad: bool) -> "Inputs":
        """Copies as new leaves, so that a call's allocations start from nothing and gradients do not mix."""
        return self.map(lambda _, t: t.detach().clone().requires_grad_(requires_grad))

    def cut(self, start: int, stop: int) -> "Inputs":
        """The tokens from ``start`` to ``stop - 1``."""

        def slice_time(name: str, t: Tensor) -> Tensor:
            if t.ndim == 1:  # a decay per head has no time
                return t
            return t[:, start:stop] if name == "x" else t[:, :, start:stop]

        return self.map(slice_time)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: t for name, t in given.items() if t is not None}


def make_inputs(config: BenchConfig, length: int) -> Inputs:
    """Draw the inputs on the CPU from the seed, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, H, D = config.batch, config.heads, config.head_dim
    q, k, v = (normal(B, H, length, D) for _ in range(3))
    x = normal(B, length, H * D)
    log_decay: Tensor | None = None
    if config.decay == "head":
        log_decay = -torch.logspace(-3, -1, H)
    elif config.decay != "none":
        shape = (B, H, length) if config.decay == "token" else (B, H, length, D)
        log_decay = F.logsigmoid(normal(*shape) + 3)  # gates that are open most of the time, as trained ones are
    phi = EluPlusOne()
    inputs = Inputs(q, k, v, log_decay, x, phi(q), phi(k))
    # A decay is summed over the sequence, so like states and gates in the library it stays in fp32 or better.
    gate_dtype = config.torch_dtype if config.torch_dtype == torch.float64 else torch.float32
    return inputs.map(
        lambda name, t: t.to(config.torch_device, gate_dtype if name == "log_decay" else config.torch_dtype)
    )
