"""Linear-angular attention of Castling-ViT: the angle between query and key, to first order."""

import math
from typing import ClassVar, Literal, Unpack

import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps.powers import direction_of
from linattn.ops.shared.call import check_choice

OUTPUT_NORMS = ("l2", "sum")


@register_mechanism("angular", paper="arXiv:2211.10526", year=2022)
class Angular(LinearBase):
    """Linear attention with the linear part of the angle between query and key.

    ``y_t = sum_s w_ts v_s``, ``w_ts = 1/2 + d(q_t).d(k_s) / pi``, ``d(x) = x / |x|``; ``o_t = y_t / |y_t|``

    The weights are the first two terms of ``1 - angle / pi``, and never below 0.18. q ``(B, H, T, D)``, k and v
    ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. The features are ``[1 / sqrt(2), d(x) / sqrt(pi)]``; nothing is
    learned. A zero vector has the direction 0. Two branches of the paper are left out: softmax attention while
    training, and a convolution of v over 9 tokens of the line, with one kernel per head. The layer's ``local`` does not
    replace that convolution: it runs over the plane, with one kernel per channel.

    Paper: You et al., Castling-ViT. Its code writes ``v_t / 2`` where its formula has ``sum_s v_s / 2``; this module
    follows the formula. State per kv head: ``(D + 1)^2`` numbers.

    Args:
        output_norm: ``"l2"``: the output has length 1, as in the paper's code; ``"sum"``: ``o_t = y_t / sum_s w_ts``.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("angular", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    rotates: ClassVar[None] = None  # one of the features is a constant, and D + 1 features do not make pairs

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        output_norm: Literal["l2", "sum"] = "l2",
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_choice("output_norm", output_norm, OUTPUT_NORMS)
        self.output_norm = output_norm

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        out = self.linear(call, {"q": _features(q), "k": _features(k), "v": v})
        if self.output_norm == "sum":
            return out
        # The mean has the direction of the sum, and stays in the range of half precision for any number of keys.
        return MechanismOutput(direction_of(out.output).to(out.output.dtype), out.state)

    @property
    def num_features(self) -> int:
        return self.head_dim + 1


def _features(x: Tensor) -> Tensor:
    return F.pad(direction_of(x) * math.pi**-0.5, (1, 0), value=0.5**0.5).to(x.dtype)
