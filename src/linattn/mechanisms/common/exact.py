"""Softmax attention over keys that a mask names: what softmax over all tokens and over a window share."""

from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, Mechanism, MechanismOutput
from linattn.ops.shared.call import check_number, compute_dtype, hide, output_dtype, without_autocast


class Exact(Mechanism):
    """Base of softmax attention, with a factor on the scores."""

    impls: ClassVar[tuple[str, ...]] = ("auto", "reference")

    def __init__(
        self, num_heads: int, head_dim: int, *, scale: float | None = None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        self.scale = head_dim**-0.5 if scale is None else scale
        check_number("scale", self.scale, above=0)

    def softmax(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, explicit: bool) -> Tensor:
        """``sum_s softmax_s(scale q_t . k_s) v_s`` over the s that ``visible (.., Tq, Tk)`` names.

        q ``(B, H, Tq, D)``, k and v ``(B, H_kv, Tk, D)``; each query must see a key.
        ``explicit``: by this formula, not SDPA.
        """
        if not explicit:
            return F.scaled_dot_product_attention(q, k, v, visible, scale=self.scale, enable_gqa=self.is_grouped)
        dtype, out_dtype = compute_dtype(q, k, v), output_dtype(v)
        with without_autocast(q):
            group = self.num_heads // self.num_kv_heads
            q, k, v = (x.to(dtype) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
            scores = (q @ k.mT * self.scale).masked_fill(~visible, -torch.inf)
            return (scores.softmax(-1) @ v).to(out_dtype)

    def one_per_row(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        """Attend over packed sequences with a state each, unpacked to one padded row each, and pack the output again.

        The rows are as long as the longest sequence, which the host must know: it waits for a GPU.
        """
        assert call.cu_seqlens is not None
        bounds = call.cu_seqlens.long()
        slots = torch.arange(int(bounds.diff().max()), device=q.device)
        mask = slots < bounds.diff()[:, None]  # (N, L)
        tokens = (bounds[:-1, None] + slots).clamp(max=max(q.shape[2] - 1, 0))
        q, k, v = (hide(x[0][:, tokens].transpose(0, 1), mask) for x in (q, k, v))  # (N, H, L, D)
        key_mask = mask if call.key_mask is None else mask & call.key_mask[0][tokens]
        out = self.attend(q, k, v, Call(call.impl, key_mask, state=call.state, need_state=True))
        return MechanismOutput(out.output.transpose(1, 2)[mask].transpose(0, 1).unsqueeze(0), out.state)

    @property
    def is_grouped(self) -> bool:
        return self.num_kv_heads != self.num_heads
