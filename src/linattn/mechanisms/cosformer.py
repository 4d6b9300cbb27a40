"""cosFormer: ReLU features with a cosine of the distance."""

import math
from dataclasses import replace
from typing import ClassVar, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput
from linattn.mechanisms.common.tokens import token_positions
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import compute_dtype, num_sequences
from linattn.ops.shared.packing import sequence_of_tokens
from linattn.ops.shared.types import LinearState

CAUSAL_MAX_LENGTH = 8192  # a fixed default, as the final length of a causal sequence is not known while it is read


class CosformerState(NamedTuple):
    """State of cosFormer: ``kv (N, H_kv, 2D, D)``, ``k (N, H_kv, 2D)`` and ``position (N,)``, the real tokens seen."""

    kv: Tensor
    k: Tensor
    position: Tensor


@register_mechanism("cosformer", paper="arXiv:2202.08791", year=2022)
class Cosformer(LinearBase):
    """Linear attention with ReLU features and a cosine that gives near tokens more weight.

    ``o_t = sum_s w_ts v_s / (sum_s w_ts + 1e-6)``, ``w_ts = relu(q_t).relu(k_s) cos(pi/2 (t - s) / M)``

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. The cosine splits into
    ``cos cos + sin sin``, which makes 2D features. The positions t and s count real tokens: padding does not advance
    them, they start anew in each packed sequence, and a state carries them on.

    Paper: Qin et al., cosFormer. State per kv head: ``2 D (D + 1)`` numbers, and one position.

    Args:
        max_length: M, at least the length of the longest sequence. Longer ones could have negative weights and are
            refused where their length is known without waiting for a GPU. None: when bidirectional, each sequence's own
            number of real tokens, as in the paper (if queries and keys are two sequences, that of the longer one); when
            causal, the fixed number 8192, so that new tokens do not change earlier outputs.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("cosformer", num_heads=2, head_dim=8, causal=True, max_length=512)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> output, state = mechanism.with_state(q, k, v)
        >>> output.shape, state.position
        (torch.Size([1, 2, 5, 8]), tensor([5]))
    """

    state_type: ClassVar[type] = CosformerState

    def __init__(
        self, num_heads: int, head_dim: int, *, max_length: int | None = None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        if max_length is not None:
            checks.check_integer("max_length", max_length)
        self.max_length = CAUSAL_MAX_LENGTH if max_length is None and self.causal else max_length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        Tq, T = q.shape[2], k.shape[2]
        state: CosformerState | None = call.state
        n = num_sequences(k, call.cu_seqlens)
        if state is not None:
            checks.check_shape("state.position", state.position, (n,))
        start = torch.zeros(n, dtype=torch.long, device=k.device) if state is None else state.position
        positions, position = token_positions(T, call.key_mask, call.cu_seqlens, start)
        if call.key_mask is None and call.cu_seqlens is None:
            self._check_length(T)
        self._check_length(Tq if Tq != T else 0)
        if self.max_length is not None and position.numel() and checks.check_values(position, None):
            self._check_length(int(position.max()))
        # Queries of another sequence (cross-attention) count from the start of that one, and have no padding to skip.
        own = positions if Tq == T else torch.arange(Tq, device=q.device).unsqueeze(0)
        length = self._length(q, k, call, position)
        arguments = {"q": self._features(q, own, length), "k": self._features(k, positions, length), "v": v}
        linear_state = None if state is None else LinearState(state.kv, state.k)
        out = self.linear(replace(call, state=linear_state), arguments)
        if not call.need_state:
            return out
        return MechanismOutput(out.output, CosformerState(out.state.kv, out.state.k, position))

    def _length(self, q: Tensor, k: Tensor, call: Call, real: Tensor) -> int | Tensor:
        """M: one number, or ``(B or 1, 1, T or 1, 1)`` from ``real (N,)``, the real tokens of each sequence."""
        Tq, T = q.shape[2], k.shape[2]
        if self.max_length is not None:
            return self.max_length
        if call.cu_seqlens is not None:
            if Tq == T:
                return real.clamp(min=1)[sequence_of_tokens(call.cu_seqlens, T)].view(1, 1, T, 1)
            # Else queries of another sequence, which linear_attention refuses with packed keys.
        elif call.key_mask is not None:
            return real.clamp(min=1 if Tq == T else max(Tq, 1)).view(-1, 1, 1, 1)
        return max(Tq, T, 1)

    def _features(self, x: Tensor, positions: Tensor, length: int | Tensor) -> Tensor:
        dtype = compute_dtype(x)
        step = math.pi / 2 / (length.to(dtype) if isinstance(length, Tensor) else length)
        angle = positions.to(dtype)[:, None, :, None] * step
        x = F.relu(x)
        return torch.cat([x * angle.cos(), x * angle.sin()], dim=-1).to(x.dtype)

    def _check_length(self, longest: int) -> None:
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"a sequence of {longest} tokens is past max_length = {self.max_length}; "
                "create the mechanism with a larger max_length"
            )

    def truncated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    @property
    def num_features(self) -> int:
        return 2 * self.head_dim

    def state_size(self, length: int) -> int:
        return super().state_size(length) + 1
