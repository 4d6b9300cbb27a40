"""What linear mechanisms share: precision, maps per head, and bases for steep features, centred weights, two flows."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput, check_length
from linattn.mechanisms.common.tokens import sum_over_tokens, with_mean_eps
from linattn.ops.maps import WideMap
from linattn.ops.shared.call import autocast_dtype, check_shape, compute_dtype, num_sequences


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, or in fp64 if it is fp64: the precision for inputs of a steep map."""
    return x.to(compute_dtype(x))


class HeadwiseLinear(nn.Module):
    """Linear map per head without bias: ``y_h = x_h W_h`` for ``x (B, H, T, D)``, ``weight (H, D, out_features)``."""

    def __init__(self, num_heads: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, in_features, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def flops(self, length: int) -> int:
        return 2 * length * self.weight.numel()

    def extra_repr(self) -> str:
        num_heads, in_features, out_features = self.weight.shape
        return f"num_heads={num_heads}, in_features={in_features}, out_features={out_features}"


class WideLinear(LinearBase):
    """Base of linear mechanisms whose features have the range of fp32; the output still has the dtype of v."""

    def feature_dtype(self, v: Tensor) -> torch.dtype:
        """fp32 for fp16, which ends at 65504, less than the third power of 41; bf16 has the range of fp32 and stays."""
        return torch.float32 if v.dtype == torch.float16 else v.dtype

    def linear(self, call: Call, arguments: dict[str, Any]) -> MechanismOutput:
        v: Tensor = arguments["v"]
        dtype = self.feature_dtype(v)
        cast = {name: x.to(dtype) for name, x in arguments.items() if isinstance(x, Tensor)}
        out = super().linear(call, arguments | cast)
        if autocast_dtype(v) is not None:  # the output has autocast's dtype already
            return out
        return MechanismOutput(out.output.to(v.dtype), out.state)


class Centred(WideLinear):
    """Base of mechanisms whose weights are a multiple of the score's distance from its mean, plus a constant.

    ``w_ts = (total_t + gain_t (z_ts - mean_s z_ts)) / N_t`` with ``z_ts = phi(q_t).phi(k_s) / sqrt(D)``

    The mean runs over the N_t visible keys. It is ``phi(q_t)`` times the mean key, so a causal mean needs only running
    sums of keys, and the features of ``gain z + (total - gain mean z) 1`` are those of phi and a constant. The state's
    ``k`` is therefore the sum of ``[phi(k), 1]``, from which the mean key is computed.
    """

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """The features phi, of width D."""

    @abstractmethod
    def gain_and_total(self, mean_score: Tensor) -> tuple[Tensor, Tensor]:
        """gain and total from the mean score ``(B, H, T, 1)`` of each query; total is the sum of its weights."""

    def feature_dtype(self, v: Tensor) -> torch.dtype:
        """At least fp32: scores and their mean nearly cancel, and features are as small as 1/N, too much for 8 bits."""
        return compute_dtype(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        dtype = compute_dtype(q, k, v)
        phi, psi = (self.features(x.to(dtype)) for x in (q, k))
        phi = phi * self.head_dim**-0.5
        one = torch.ones_like(psi[..., :1])
        psi = torch.cat([psi, one], dim=-1)
        initial = None
        if call.state is not None:
            initial = call.state.k.to(dtype)
            check_shape("state.k", initial, (num_sequences(k, call.cu_seqlens), self.num_kv_heads, self.num_features))
        sums = sum_over_tokens(psi, call, causal=self.causal, initial=initial)
        count = sums[..., -1:].clamp(min=1)
        mean = sums[..., :-1] / count
        group = self.num_heads // self.num_kv_heads
        mean_score = (phi * mean.repeat_interleave(group, dim=1)).sum(-1, keepdim=True)
        gain, total = self.gain_and_total(mean_score)
        keys, turn = psi[..., :-1], call.rotate if self.rotates == "features" else None
        if turn is not None:  # turns z but not its mean
            phi, keys = turn(phi, keys)
        if self.causal or turn is not None:
            total = total - gain * mean_score
        else:  # all queries have one mean key: with centred keys no digits are lost to it
            keys = keys - mean
        psi = torch.cat([keys, one], dim=-1)
        phi = torch.cat([gain * phi, total.expand(*phi.shape[:3], 1)], dim=-1) / count.repeat_interleave(group, dim=1)
        return self.linear(replace(call, rotate=None), {"q": phi, "k": psi, "v": v, "normalizer": None})

    @property
    def num_features(self) -> int:
        return self.head_dim + 1

    @property
    def turned_width(self) -> int:
        return self.head_dim  # the constant feature is not turned


class TwoFlows(WideLinear):
    """Base of mechanisms with two flows: two linear attentions, each on one half of v's channels, in one call.

    Each flow of a head is a virtual head, 2H in all, with ``2D`` features and values of ``D/2`` channels.
    """

    def __init__(self, num_heads: int, head_dim: int, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, each flow takes one half of v, got {head_dim}")

    @abstractmethod
    def maps(self) -> tuple[WideMap, WideMap]:
        """The feature maps of q and k, with two flows each."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        map_q, map_k = self.maps()
        map_q, eps = with_mean_eps(map_q, q, k, call, causal=self.causal)
        return self.linear(call, {"q": q, "k": k, "v": v, "feature_map": (map_q, map_k), "eps": eps})

    @property
    def num_features(self) -> int:
        return 2 * self.head_dim

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * self.num_features * (self.head_dim + 2)

    def flops(self, length: int) -> int:
        """Those of a linear attention with 2D features and a denominator in each flow."""
        check_length(length)
        return length * (self.num_heads + self.num_kv_heads) * 2 * self.num_features * (self.head_dim + 2)
