"""The arguments of one call of exponential attention, checked together before any work is done."""

import math
import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.ops.exponential.types import ExponentialState
from linattn.ops.shared import checks
from linattn.ops.shared.packing import num_sequences


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
        self._check_shapes()
        if self.scale is not None and (
            not isinstance(self.scale, numbers.Real) or not math.isfinite(self.scale) or self.scale <= 0
        ):
            raise ValueError(f"scale must be a positive number or None (K**-0.5), got {self.scale!r}")
        values = checks.check_values(self.q, self.validate)
        B, H_kv, T, _ = self.k.shape
        if self.key_mask is not None:
            checks.check_key_mask(self.key_mask, B, T, self.q)
        if self.cu_seqlens is not None:
            checks.check_cu_seqlens(self.cu_seqlens, B, T, self.q, values)
        for name, gate in (("log_input", self.log_input), ("log_decay", self.log_decay)):
            checks.check_tensor(name, gate, "(B, H_kv, T)", 3)
            checks.check_shape(name, gate, (B, H_kv, T))
            checks.check_device(name, gate, self.q)
        log_input, log_decay = self.masked_gates()
        checks.check_log_decay(log_decay, [(B, H_kv, T)], self.q, values)
        if values and not bool((log_input < torch.inf).all()):
            raise ValueError("log_input must be below +inf and not NaN at every real token")
        if self.initial_state is not None:
            self._check_state(self.initial_state)

    def masked_gates(self) -> tuple[Tensor, Tensor]:
        """The gates with those of masked tokens replaced, so that these add nothing and decay nothing."""
        if self.key_mask is None:
            return self.log_input, self.log_decay
        padding = ~self.key_mask.unsqueeze(1)
        return self.log_input.masked_fill(padding, -torch.inf), self.log_decay.masked_fill(padding, 0)

    def _check_shapes(self) -> None:
        q, k, v = self.q, self.k, self.v
        checks.check_tensor("q", q, "(B, H, T, K)", 4)
        checks.check_tensor("k", k, "(B, H_kv, T, K)", 4)
        checks.check_tensor("v", v, "(B, H_kv, T, V)", 4)
        checks.check_same("q", q, k=k, v=v)
        checks.check_groups(q.shape[1], k.shape[1])
        checks.check_size("k", "head dimension", k.shape[3], q.shape[3], "q")
        checks.check_size("v", "number of heads", v.shape[1], k.shape[1], "k")
        for name, x in (("k", k), ("v", v)):
            checks.check_size(name, "batch size", x.shape[0], q.shape[0], "q")
            checks.check_size(name, "length", x.shape[2], q.shape[2], "q")

    def _check_state(self, state: object) -> None:
        if not isinstance(state, ExponentialState):
            raise TypeError(
                f"initial_state must be an ExponentialState(kv, k, log_scale) or None, got {type(state).__name__}"
            )
        n, H_kv, K, V = num_sequences(self.k, self.cu_seqlens), self.k.shape[1], self.k.shape[3], self.v.shape[3]
        for name, x, shape in (
            ("kv", state.kv, (n, H_kv, K, V)),
            ("k", state.k, (n, H_kv, K)),
            ("log_scale", state.log_scale, (n, H_kv)),
        ):
            checks.check_tensor(f"initial_state.{name}", x, str(shape), len(shape))
            checks.check_shape(f"initial_state.{name}", x, shape)
            checks.check_device(f"initial_state.{name}", x, self.q)
