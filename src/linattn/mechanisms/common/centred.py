"""Attention whose weights are 1/N plus a multiple of the score's distance from its mean."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, MechanismOutput
from linattn.mechanisms.common.over_tokens import sum_over_tokens
from linattn.mechanisms.common.wide import WideLinear
from linattn.ops.shared.call import compute_dtype, num_sequences
from linattn.ops.shared.checks import check_shape


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
        sums = sum_over_tokens(psi, call, causal=self.causal, initial=self._summed(k, call))
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

    def _summed(self, k: Tensor, call: Call) -> Tensor | None:
        if call.state is None:
            return None
        shape = (num_sequences(k, call.cu_seqlens), self.num_kv_heads, self.num_features)
        check_shape("state.k", call.state.k, shape)
        return call.state.k.to(compute_dtype(k))

    @property
    def num_features(self) -> int:
        return self.head_dim + 1

    @property
    def turned_width(self) -> int:
        return self.head_dim  # the constant feature is not turned
