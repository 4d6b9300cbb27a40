"""Softmax attention: the yardstick."""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, MechanismOutput, check_length
from linattn.mechanisms.common.exact import Exact
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared import call as checks
from linattn.ops.shared.packing import sequence_of_tokens


class SoftmaxState(NamedTuple):
    """State of softmax attention: all keys and values so far ``(N, H_kv, S, D)``, one row per sequence.

    ``mask (N, S)`` is True where a slot holds a real token; None: all do.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


@register_mechanism("softmax", paper="arXiv:1706.03762", year=2017, state="growing", cost="quadratic")
class Softmax(Exact):
    """Softmax attention, exact and quadratic: what linear attention is measured against.

    ``o_t = sum_s softmax_s(scale q_t . k_s) v_s`` over the visible keys; the output of a query that sees none is 0.

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``.

    Paper: Vaswani et al., Attention Is All You Need. State per kv head: ``2 T D`` numbers, the keys and values.

    Args:
        scale: factor on the scores; None: ``D^-0.5``.
        impl: ``"auto"``: ``torch.nn.functional.scaled_dot_product_attention``; ``"reference"``: the formula.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("softmax", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> output, state = mechanism.with_state(q, k, v)
        >>> output.shape, state.keys.shape
        (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5, 8]))
    """

    state_type: ClassVar[type] = SoftmaxState

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        self._check_lengths(q, k, v, call)
        if call.need_state and call.cu_seqlens is not None:
            return self.one_per_row(q, k, v, call)
        if not call.need_state:
            return MechanismOutput(self._softmax(q, k, v, call.impl, call.key_mask, call.cu_seqlens), None)
        state, mask = call.state, call.key_mask
        if state is not None:
            mask = _join_masks(state, k, mask)
            k, v = torch.cat([state.keys.to(k), k], dim=2), torch.cat([state.values.to(v), v], dim=2)
        return MechanismOutput(self._softmax(q, k, v, call.impl, mask), SoftmaxState(k, v, mask))

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, impl: str, key_mask: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Softmax attention. When causal, the last query stands at the last key: earlier keys come from a state."""
        Tq, Tk = q.shape[2], k.shape[2]
        masked = key_mask is not None or cu_seqlens is not None or (self.causal and Tq != Tk and Tq != 1)
        explicit = impl == "reference" or Tk == 0
        if not masked and not explicit:
            causal = self.causal and Tq > 1
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=self.scale, enable_gqa=self.is_grouped
            )
        visible = torch.ones(1, 1, Tq, Tk, dtype=torch.bool, device=q.device)
        if self.causal:
            visible = visible.tril(Tk - Tq)
        if key_mask is not None:
            visible = visible & key_mask[:, None, None, :]
        if cu_seqlens is not None:
            own = sequence_of_tokens(cu_seqlens, Tk)
            visible = visible & (own[:, None] == own[None, :])
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | blind  # the softmax of nothing is NaN: such a row sees everything, and its output is wiped
        return self.softmax(q, k, v, visible, explicit=explicit).masked_fill(blind, 0)

    def _check_lengths(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        if self.causal or call.cu_seqlens is not None:
            checks.check_size("k", "length", k.shape[2], q.shape[2], "q")
        if call.state is None:
            return
        n = k.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
        for name, x in (("state.keys", call.state.keys), ("state.values", call.state.values)):
            checks.check_shape(name, x, (n, self.num_kv_heads, call.state.keys.shape[2], self.head_dim))
            checks.check_device(name, x, q)

    def state_size(self, length: int) -> int:
        check_length(length)
        return 2 * self.num_kv_heads * length * self.head_dim

    def flops(self, length: int) -> int:
        """4 D per visible pair, for the scores and the weighted sum."""
        check_length(length)
        pairs = length * (length + 1) // 2 if self.causal else length**2
        return 4 * self.num_heads * self.head_dim * pairs


def _join_masks(state: SoftmaxState, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    if state.mask is None and key_mask is None:
        return None
    old = state.keys.new_ones(state.keys.shape[0], state.keys.shape[2], dtype=torch.bool)
    new = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
    return torch.cat([old if state.mask is None else state.mask, new if key_mask is None else key_mask], dim=1)
