"""Learned decays that cannot exceed 1, fixed or computed from the input."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.ops.shared.call import compute_dtype

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1


class HeadDecay(nn.Module):
    """Decay per head. ``log lambda``: ``log sigmoid(a) (H,)``, or of an input ``log sigmoid(W x + b) (B, H, T)``.

    The result is fp32 or fp64.
    """

    def __init__(self, num_heads: int, head_dim: int, input_dim: int | None) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.empty(num_heads)) if input_dim is None else None
        self.gate = None if input_dim is None else nn.Linear(input_dim, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.logit is not None:
            nn.init.normal_(self.logit)
        if self.gate is not None:
            nn.init.trunc_normal_(self.gate.weight, std=0.02)
            nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor | None) -> Tensor:
        if self.gate is None:
            assert self.logit is not None
            return F.logsigmoid(self.logit.to(compute_dtype(self.logit)))
        assert x is not None
        logits = self.gate(x)
        return F.logsigmoid(logits.to(compute_dtype(logits))).transpose(1, 2)


class ChannelDecay(nn.Module):
    """Decay per channel. ``log lambda``: ``B (H, D)``, or of an input ``B (1 + sigmoid(W x + b)) (B, H, T, D)``.

    The result is fp32 or fp64. ``B = -exp(theta)`` is negative for any theta. It starts at HiPPO's real diagonal
    ``-(n + 1)``, n = 0, 1, ..., times a step per head, from 0.001 to 0.1.
    """

    def __init__(self, num_heads: int, head_dim: int, input_dim: int | None) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads, head_dim))
        self.gate = None if input_dim is None else nn.Linear(input_dim, num_heads * head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        (heads, channels), device = self.log_rate.shape, self.log_rate.device
        # The device is named for both: transformers loads models on the meta device, where linspace is an exception.
        steps = torch.linspace(math.log(SHORTEST_STEP), math.log(LONGEST_STEP), heads, device=device)
        with torch.no_grad():
            self.log_rate.copy_(steps[:, None] + torch.arange(1, channels + 1, device=device).log())
        if self.gate is not None:
            nn.init.normal_(self.gate.weight, std=0.1)
            nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor | None) -> Tensor:
        rate = -self.log_rate.to(compute_dtype(self.log_rate)).exp()
        if self.gate is None:
            return rate
        assert x is not None
        logits = self.gate(x).unflatten(2, self.log_rate.shape).transpose(1, 2)
        return rate.unsqueeze(1) * (1 + logits.to(rate.dtype).sigmoid())
