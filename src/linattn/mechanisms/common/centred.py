"""Attention whose weights are 1/N plus a multiple of the score's distance from its mean."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, MechanismOutput
from linattn.mechanisms.common.over_tokens import sum_over_tokens
from linattn.mechanisms.common.wide import WideLinear
from linattn.ops.checks import check_shape
from linattn.ops.packing import compute_dtype, num_sequences


class Centred(WideLinear):
    """``w_ts = (total_t + gain_t (z_ts - mean_s z_ts)) / N_t`` with ``z_ts = phi(q_t).phi(k_s) / sqrt(D)``.

    The mean runs over the N_t visible keys. It is ``phi(q_t)`` times the mean key, so a causal one needs running
    sums of keys and nothing else: ``gain z + (total - gain mean z) 1`` has the features of phi and a constant.
    The state's ``k`` then is the sum of ``[phi(k), 1]``: what the mean key is made of.
    """

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """phi, of width D."""

    @abstractmethod
    def gain_and_total(self, mean_score: Tensor) -> tuple[Tensor, Tensor]:
        """From the mean score ``(B, H, T, 1)`` of a query; total is the sum of its weights."""

    def feature_dtype(self, v: Tensor) -> torch.dtype:
        """Scores and their mean nearly cancel, and features are as small as 1/N: not with 8 bits."""
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
        if turn is not None:  # z alone is turned, its mean is not
            phi, keys = turn(phi, keys)
        if self.causal or turn is not None:
            total = total - gain * mean_score
        else:  # one mean for all queries: centred keys lose no digits to it
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
