"""Hydra attention: as many heads as channels."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, LinearBase, MechanismOutput, check_length
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps.powers import direction_of
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import compute_dtype, num_sequences, output_dtype, without_autocast
from linattn.ops.shared.types import LinearState


class HydraState(NamedTuple):
    """State of Hydra: ``kv (N, H_kv, D)``, the sum of ``d(k_s) v_s`` over the tokens so far, one row per sequence."""

    kv: Tensor


@register_mechanism("hydra", paper="arXiv:2209.07484", year=2022)
class Hydra(LinearBase):
    """Linear attention with as many heads as channels, each with a single cosine feature.

    ``o_t = d(q_t) * sum_s d(k_s) * v_s`` channel by channel, ``d(x) = x / |x|``, no normaliser

    The norm ``|x|`` runs over the channels of all heads together, H heads for q and H_kv heads for k.
    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``; the query heads of a group share their
    sums. Nothing is learned; a zero vector has the direction 0.

    Paper: Bolya et al., Hydra Attention. State per kv head: ``D`` numbers.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("hydra", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> output, state = mechanism.with_state(q, k, v)
        >>> output.shape, state.kv.shape
        (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 8]))
    """

    state_type: ClassVar[type] = HydraState
    rotates: ClassVar[None] = None  # with one feature per head there is no pair to turn

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        dtype = compute_dtype(q, k, v)
        state: LinearState | None = None
        if call.state is not None:
            shape = (num_sequences(k, call.cu_seqlens), self.num_kv_heads, self.head_dim)
            checks.check_shape("state.kv", call.state.kv, shape)
            state = LinearState(call.state.kv.unsqueeze(2), torch.zeros_like(call.state.kv[..., :1]))
        # A query only scales the sum of its channel, and that is a linear attention with one constant feature.
        values = direction_of(k.to(dtype), (1, 3)) * v.to(dtype)
        ones = torch.ones_like(values[..., :1])
        readers = ones if q.shape[2] == k.shape[2] else ones.new_ones(*ones.shape[:2], q.shape[2], 1)
        arguments = {"q": readers, "k": ones, "v": values, "normalizer": None}
        with without_autocast(q):
            sums = self.linear(replace(call, state=state), arguments)
        queries = direction_of(q.to(dtype), (1, 3)).unflatten(1, (self.num_kv_heads, -1))
        output = (queries * sums.output.unsqueeze(2)).flatten(1, 2).to(output_dtype(v))
        return MechanismOutput(output, HydraState(sums.state.kv.squeeze(2)) if call.need_state else None)

    @property
    def num_features(self) -> int:
        return 1

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * self.head_dim

    def flops(self, length: int) -> int:
        """Each channel is a head with K = V = 1 and no denominator, written and read with 2 operations per token."""
        check_length(length)
        return length * (self.num_heads + self.num_kv_heads) * 2 * self.head_dim
