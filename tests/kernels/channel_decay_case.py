"""One call of attention with a decay per channel: kernels and reference, errors and what is allowed.

The budget: ``err <= 2 (err(reference form in that dtype) + eps max(abs(exact)))``, errors against fp64 (see
linattn/testing/precision.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.device import DEVICE
from linattn import linear_attention_with_state
from linattn.kernels.channel_decay.attend import attend_channel_decay
from linattn.ops.shared.types import LinearState

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Decay = Callable[[Tensor], Tensor]


@dataclass
class Case:
    """One call; ``decay`` turns normal noise (B, H_kv, T, K) into log decays."""

    dtype: torch.dtype = BF16
    B: int = 1
    H: int = 2
    H_kv: int = 2
    T: int = 70
    K: int = 16
    V: int = 16
    normalizer: str | None = None
    decay_index: str = "query"
    decay: Decay = F.logsigmoid
    state: bool = False  # gives the final one, with its gradient
    initial: bool = False
    masked: bool = False
    cu_seqlens: list[int] | None = None
    scale: float = 1.0
    form: str = "reference"  # what it is held against
    tensors: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        B, H, H_kv, T, K, V = self.B, self.H, self.H_kv, self.T, self.K, self.V
        q, k, v = noise(B, H, T, K), noise(B, H_kv, T, K), noise(B, H_kv, T, V)
        if self.normalizer is not None:
            q, k = q.abs(), k.abs() + 0.3
        if self.normalizer == "abs_max_one":
            # Far from 1 on both sides: the gradient jumps there, and rounding would decide to which side.
            q = q * torch.where(noise(B, H, T, 1) > 0.5, 1e-3, 1.0)
        rows = B if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        kv, z = noise(rows, H_kv, K, V), noise(rows, H_kv, K).abs() + 0.3
        if self.normalizer is not None:
            kv = kv * z.unsqueeze(-1)  # as sums of values weighted by keys are
        self.tensors = {
            "q": (q * self.scale).to(self.dtype),
            "k": (k * self.scale).to(self.dtype),
            "v": v.to(self.dtype),
            "log_decay": self.decay(noise(B, H_kv, T, K)),
            "kv": kv if self.initial else None,
            "z": z if self.initial else None,
        }
        self.key_mask = (noise(B, T) > -0.6).to(DEVICE) if self.masked else None
        self.cu = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, device=DEVICE)
        self.cotangents = [noise(B, H, T, V), noise(rows, H_kv, K, V), noise(rows, H_kv, K)]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, initial: LinearState | None):
        return linear_attention_with_state(
            q, k, v, causal=True, log_decay=a, normalizer=self.normalizer, key_mask=self.key_mask,
            cu_seqlens=self.cu, decay_index=self.decay_index, initial_state=initial, impl=self.form,
        )  # fmt: skip

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, initial: LinearState | None):
        if self.key_mask is not None:
            a = a.masked_fill(~self.key_mask[:, None, :, None], torch.nan)
        return attend_channel_decay(
            q, k, v, log_decay=a, decay_index=self.decay_index, normalizer=self.normalizer, eps=1e-6,
            key_mask=self.key_mask, cu_seqlens=self.cu, initial=initial, out_dtype=v.dtype, need_state=self.state,
        )  # fmt: skip

    def evaluate(self, form: Callable, dtype: torch.dtype, view: Callable[[Tensor], Tensor] | None = None):
        """Output, states and all gradients, in fp64 on the CPU."""
        wide = torch.float64 if dtype == torch.float64 else FP32
        leaves = {
            name: x.to(DEVICE, dtype if name in ("q", "k", "v") else wide, copy=True).requires_grad_()
            for name, x in self.tensors.items()
            if x is not None
        }
        view = view or (lambda x: x)
        q, k, v = (view(leaves[name]) for name in "qkv")
        if self.key_mask is not None:  # what a masked token holds does not matter
            hidden = ~self.key_mask[:, None, :, None]
            k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        initial = LinearState(leaves["kv"], leaves["z"]) if self.initial else None
        output, state = form(q, k, v, leaves["log_decay"], initial)
        if self.key_mask is not None:
            output = output * self.key_mask[:, None, :, None]
        found = {"output": output}
        if self.state:
            found |= {"state kv": state.kv, "state k": state.k}
        gradients = torch.autograd.grad(
            list(found.values()),
            list(leaves.values()),
            [c.to(x) for x, c in zip(found.values(), self.cotangents, strict=False)],
        )
        found |= {f"d {name}": g for name, g in zip(leaves, gradients, strict=True)}
        return {name: x.detach().double().cpu() for name, x in found.items()}

    def errors(self, view: Callable[[Tensor], Tensor] | None = None) -> dict[str, tuple[float, float]]:
        """Of each result the error and what is allowed."""
        exact = self.evaluate(self.reference, torch.float64)
        plain = self.evaluate(self.reference, self.dtype)
        found = self.evaluate(self.kernels, self.dtype, view)
        sizes = {}
        for name, x in exact.items():
            cost, size = (plain[name] - x).abs().max().item(), x.abs().max().item()
            # The reference too adds what cancels, numbers near 1, before it comes to a decay's tiny gradient.
            budget = 2 * (cost + torch.finfo(self.dtype).eps * max(size, 1e-6))
            if self.dtype == FP32 and name == "d log_decay":
                budget *= 2  # the reference adds up pairs, in fp64; kernels sum q dq - k dk along the sequence in fp32
            sizes[name] = (found[name] - x).abs().max().item(), budget
        return sizes

    def check(self, view: Callable[[Tensor], Tensor] | None = None) -> None:
        for name, (error, budget) in self.errors(view).items():
            assert error <= budget, f"{name}: error {error:.3g}, allowed {budget:.3g}"


def mixed(noise: Tensor) -> Tensor:
    """Closed gates and open ones, side by side in one chunk."""
    return torch.where(noise > 1.5, -800.0, torch.where(noise > 1, -50.0, torch.where(noise < 0, 0.0, -0.1 * noise)))


def as_trained(noise: Tensor) -> Tensor:
    """As trained gates are: every chunk is mild."""
    return F.logsigmoid(noise + 3)


def at_the_limit(noise: Tensor) -> Tensor:
    """A half of 64 tokens decays by about 2^-80: chunks of both kinds side by side, and channels of both in one."""
    return -1.7 * noise.abs()


def once(noise: Tensor) -> Tensor:
    """One token forgets everything; around it digits of small decays count."""
    at = torch.arange(noise.shape[2]) == 40
    return torch.where(at[:, None], -800.0, -0.05 * noise.abs())


DECAYS: dict[str, Decay] = {
    "mixed": mixed,
    "once": once,
    "all forget": lambda noise: torch.full_like(noise, -800.0),
    "minus fifty": lambda noise: torch.full_like(noise, -50.0),
    "no decay": torch.zeros_like,
    "minus infinity": lambda noise: torch.where(noise > 1, -torch.inf, -0.1 * noise.abs()),
}
