"""Exponential attention: its types, and the arguments of one call, checked together before any work is done."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.shared import call as checks
from linattn.ops.shared.call import num_sequences


class ExponentialState(NamedTuple):
    """State of exponential attention: gated and decayed sums in units of ``e^{log_scale}``.

    The sum of ``k_s v_s^T`` is ``e^{log_scale} kv``, and the sum of the keys is ``e^{log_scale} k``, with
    ``kv (B, H_kv, K, V)``, ``k (B, H_kv, K)`` and ``log_scale (B, H_kv)``, which is -inf for an empty state. All are
    fp32, or fp64 for fp64 inputs. With ``cu_seqlens`` B counts sequences.
    """

    kv: Tensor
    k: Tensor
    log_scale: Tensor


class ExponentialOutput(NamedTuple):
    """Output ``(B, H, T, V)`` together with the state after the last token."""

    output: Tensor
    state: ExponentialState


@dataclass(frozen=True)
class Gates:
    """Gates ``(B, H_kv, T)`` in fp64; masked tokens have ``log_input`` -inf and ``log_decay`` 0."""

    log_input: Tensor
    log_decay: Tensor
    cu_seqlens: Tensor | None = None

    def part(self, start: int, end: int) -> "Gates":
        """The gates of one packed sequence."""
        return Gates(self.log_input[:, :, start:end], self.log_decay[:, :, start:end])


class ExponentialSums(NamedTuple):
    """The result of one form before the division; sums at token t are in units of ``e^{log_scale_t}``."""

    numerator: Tensor  # (B, H, T, V)
    denominator: Tensor  # (B, H, T)
    log_scale: Tensor  # (B, H_kv, T), fp64
    state: ExponentialState  # its log_scale in fp64


@dataclass(frozen=True)
class ExponentialCall:
    """The arguments of ``exponential_attention``, and a state."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_input: Tensor
    log_decay: Tensor
    scale: float | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    validate: bool | None = None
    initial_state: ExponentialState | None = None
    need_state: bool = False

    @property
    def is_step(self) -> bool:
        """Whether the call is one token of decoding."""
        return self.k.shape[2] == 1 and self.key_mask is None and self.cu_seqlens is None and self.need_state

    def check(self) -> None:
        """Raise TypeError or ValueError that names the argument and what is allowed."""
        q, k, v = self.q, self.k, self.v
        checks.check_qkv(q, k, v)
        checks.check_scale(self.scale)
        B, H_kv, T, K = k.shape
        values = checks.check_layout(self.key_mask, self.cu_seqlens, B, T, q, self.validate)
        checks.check_input("log_input", self.log_input, "(B, H_kv, T)", (B, H_kv, T), q)
        checks.check_input("log_decay", self.log_decay, "(B, H_kv, T)", (B, H_kv, T), q)
        checks.check_log_decay(self.masked_gates()[1], [(B, H_kv, T)], q, values)
        checks.check_log_input(self.log_input, self.key_mask, values)
        n = num_sequences(k, self.cu_seqlens)
        shapes = {"kv": (n, H_kv, K, v.shape[3]), "k": (n, H_kv, K), "log_scale": (n, H_kv)}
        checks.check_state(self.initial_state, ExponentialState, shapes, q)

    def masked_gates(self) -> tuple[Tensor, Tensor]:
        """The gates with those of masked tokens replaced, so that these add nothing and decay nothing."""
        if self.key_mask is None:
            return self.log_input, self.log_decay
        padding = ~self.key_mask.unsqueeze(1)
        return self.log_input.masked_fill(padding, -torch.inf), self.log_decay.masked_fill(padding, 0)
