"""The small types that every form of the algebra shares."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor

Normalizer = Literal["sum", "abs_max_one"] | None
DecayIndex = Literal["key", "query"]

NORMALIZERS = ("sum", "abs_max_one", None)
DECAY_INDICES = ("key", "query")
# exp(-800) is 0 in every dtype: bounding stronger decays, also -inf, changes no result and keeps sums finite.
STRONGEST_DECAY = -800.0


class LinearState(NamedTuple):
    """State of linear attention, whose size does not grow with the sequence.

    ``kv (B, H_kv, K, V)`` is the decayed sum of ``k_s v_s^T``, and ``k (B, H_kv, K)`` the decayed sum of the keys that
    the denominator uses. Both are fp32, or fp64 for fp64 inputs. With ``cu_seqlens`` B counts sequences.
    """

    kv: Tensor
    k: Tensor


class AttentionOutput(NamedTuple):
    """Output ``(B, H, T, V)`` together with the state after the last token."""

    output: Tensor
    state: LinearState


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, and how strongly: the matrix M of the algebra.

    ``log_decay`` is None, ``(H_kv,)``, ``(B, H_kv, T)`` or ``(B, H_kv, T, K)``, already zero at masked tokens.
    """

    causal: bool = False
    log_decay: Tensor | None = None
    decay_index: DecayIndex = "query"
    cu_seqlens: Tensor | None = None

    def part(self, start: int, end: int) -> "Pattern":
        """The pattern of one packed sequence."""
        a = self.log_decay
        return replace(self, log_decay=a if a is None or a.ndim == 1 else a[:, :, start:end], cu_seqlens=None)


class Sums(NamedTuple):
    """The unnormalised result of one form, in fp32 or fp64."""

    numerator: Tensor  # (B, H, Tq, V)
    denominator: Tensor  # (B, H, Tq)
    state: LinearState
