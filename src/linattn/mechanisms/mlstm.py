"""mLSTM: a matrix memory with input and forget gates."""

import math
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput
from linattn.mechanisms.common.linear import wide
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.exponential.api import EXPONENT_BOUND, exponential_attention, exponential_attention_with_state
from linattn.ops.exponential.call import ExponentialState
from linattn.ops.exponential.chunked import stabilize
from linattn.ops.linear.api import linear_attention
from linattn.ops.shared.call import (
    check_choice,
    check_flag,
    check_number,
    compute_dtype,
    hide,
    output_dtype,
    widen,
    without_autocast,
)
from linattn.ops.shared.types import LinearState

FORGET_BIAS = (3.0, 6.0)  # of the first and the last head
INPUT_BIAS_STD = 0.1


@register_mechanism("mlstm", paper="arXiv:2405.04517", year=2024, uses_input=True)
class Mlstm(LinearBase):
    """Linear attention with a forget gate and an exponential or sigmoid input gate: the matrix memory of xLSTM.

    ``C_t = f_t C_{t-1} + i_t k_t v_t^T``, ``n_t = f_t n_{t-1} + i_t k_t``,
    ``o_t = q_t C_t / max(|q_t . n_t|, 1)``, with ``q_t`` divided by ``sqrt(D)``

    ``f_t = sigmoid(w_f . x_t + b_f)``; ``i_t = exp(w_i . x_t + b_i)`` (mLSTMexp, kept in units of a running maximum, so
    that no gate overflows) or ``sigmoid(w_i . x_t + b_i)`` (mLSTMsig). When bidirectional, the same recurrence runs
    from both ends, with each token counted once. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``,
    x ``(B, T, input_dim)``, output ``(B, H, T, D)``; gates are per kv head. They start with ``w_f = w_i = 0``, ``b_f``
    from 3 to 6 over the heads and ``b_i`` drawn from N(0, 0.1^2). The paper's convolution, norm per head, output gate
    and skip belong to the layer.

    Paper: Beck et al., xLSTM: Extended Long Short-Term Memory; the sigmoid gate: Beck et al., Tiled Flash Linear
    Attention, arXiv:2503.14376. The gradient is exact, whereas the published kernels treat the denominator as a
    constant. State per kv head: ``D (D + 1)`` numbers, and one more, its unit, with the exponential gate.

    Args:
        input_gate: ``"exponential"`` or ``"sigmoid"``.
        normalize: whether to divide by ``max(|q_t . n_t|, 1)``; required by the exponential gate.
        input_bias: initial value of ``b_i``, e.g. -10 as in xLSTM 7B; None: drawn as above.
        soft_cap: c, with which the gates take ``c tanh(z / c)`` instead of their pre-activation z (xLSTM 7B: 15); None:
            z itself.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("mlstm", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v, x=torch.randn(1, 5, 16)).shape
        torch.Size([1, 2, 5, 8])
    """

    state_type: ClassVar[type] = ExponentialState
    rotates: ClassVar[Literal["inputs"]] = "inputs"  # there is no feature map: keys are signed, also in n

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        input_gate: Literal["exponential", "sigmoid"] = "exponential",
        normalize: bool = True,
        input_bias: float | None = None,
        soft_cap: float | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_choice("input_gate", input_gate, ("exponential", "sigmoid"))
        check_flag("normalize", normalize)
        if not normalize and input_gate == "exponential":
            raise ValueError("normalize=False needs input_gate='sigmoid': sums of exponentials grow without bound")
        if input_bias is not None:
            check_number("input_bias", input_bias)
        if soft_cap is not None:
            check_number("soft_cap", soft_cap, above=0)
        self.input_gate, self.normalize = input_gate, normalize
        self.input_bias, self.soft_cap = input_bias, soft_cap
        self.input_map = nn.Linear(self.input_dim, self.num_kv_heads)
        self.forget_map = nn.Linear(self.input_dim, self.num_kv_heads)
        if input_gate == "sigmoid":
            vars(self)["state_type"] = LinearState  # it needs no unit
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.input_map.weight)
        nn.init.zeros_(self.forget_map.weight)
        with torch.no_grad():
            self.forget_map.bias.copy_(torch.linspace(*FORGET_BIAS, self.num_kv_heads))
        if self.input_bias is None:
            nn.init.normal_(self.input_map.bias, std=INPUT_BIAS_STD)
        else:
            nn.init.constant_(self.input_map.bias, self.input_bias)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``log i`` and ``log f``, ``(B, H_kv, T)``, in fp32 or fp64; an uncapped exponential ``log i`` is not cast."""
        log_input, forget = self._capped(self.input_map(x)), self._capped(self.forget_map(x))
        if self.input_gate == "sigmoid":
            log_input = F.logsigmoid(wide(log_input))
        # Transposed last: with a transposed input, logsigmoid returns other strides than torch.compile expects.
        return log_input.transpose(1, 2), F.logsigmoid(wide(forget)).transpose(1, 2)

    def _capped(self, logits: Tensor) -> Tensor:
        if self.soft_cap is None:
            return logits
        return self.soft_cap * (wide(logits) / self.soft_cap).tanh()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        log_input, log_decay = self.gates(self.input_of(call.x, k))
        if self.input_gate == "sigmoid" and not (self.causal and self.normalize):
            # In either direction the recurrence decays before it writes: decay_index is "query".
            options: dict[str, Any] = {"log_decay": log_decay, "decay_index": "query"}
            options["normalizer"] = "abs_max_one" if self.normalize else None
            if call.need_state:
                q = q * self.head_dim**-0.5
            else:  # the scale goes into the keys' weights, which saves a pass over q; a state must hold unscaled keys
                log_input = log_input - 0.5 * math.log(self.head_dim)
            return self.linear(call, {"q": q, "k": k, "v": v, "log_input": log_input, **options})
        options = {"log_input": log_input, "log_decay": log_decay, "key_mask": call.key_mask,
                   "cu_seqlens": call.cu_seqlens, "impl": call.impl}  # fmt: skip
        if not self.causal:
            q = q.to(compute_dtype(q)) * self.head_dim**-0.5
            return MechanismOutput(exponential_both_ways(q, k, v, **options), None)
        # A sigmoid gate is an exponential gate below 1: given its logarithm, the same function serves, with plain keys.
        if not call.need_state:
            return MechanismOutput(exponential_attention(q, k, v, **options), None)
        state = call.state
        if isinstance(state, LinearState):
            state = ExponentialState(*state, state.k.new_zeros(state.k.shape[:2]))
        output, state = exponential_attention_with_state(q, k, v, initial_state=state, **options)
        if self.input_gate == "sigmoid":
            unit = state.log_scale.exp()
            return MechanismOutput(output, LinearState(state.kv * unit[..., None, None], state.k * unit[..., None]))
        return MechanismOutput(output, state)

    def state_size(self, length: int) -> int:
        return super().state_size(length) + (self.num_kv_heads if self.input_gate == "exponential" else 0)

    def flops(self, length: int) -> int:
        """A bidirectional recurrence takes two sweeps; the gates are computed once."""
        gates = 2 * length * (self.input_map.weight.numel() + self.forget_map.weight.numel())
        return super().flops(length) * (1 if self.causal else 2) + gates


def exponential_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_input: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Bidirectional exponential attention: ``o_t = sum_s w_ts v_s / max(|sum_s w_ts|, 1)``.

    ``w_ts = F_ts e^{i_s} q_t . k_s``, where ``F_ts`` is the product of the decay of t and the decays between t and s,
    and 1 for s = t. Shapes are those of ``exponential_attention``; ``q`` must be scaled already.

    The sums along the sequence are in units of ``e^{m_t}`` with m their running maximum, and the sums against it in
    units of their own. Both include the token t itself, so it is subtracted once. The rounding error of that is small
    compared with the same token in the other sum.
    """
    dtype, out_dtype = compute_dtype(q, k, v), output_dtype(v)
    with without_autocast(q):
        q, k, v = (x.to(dtype) for x in (q, hide(k, key_mask), hide(v, key_mask)))
        i, f = widen(log_input), widen(log_decay)
        if key_mask is not None:
            i, f = (x.masked_fill(~key_mask.unsqueeze(1), value) for x, value in ((i, -torch.inf), (f, 0.0)))
        values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # a column of ones sums the weights
        group = q.shape[1] // k.shape[1]

        def weigh(sums: Tensor, exponent: Tensor) -> Tensor:
            return sums * exponent.exp().to(dtype).repeat_interleave(group, dim=1).unsqueeze(-1)

        def sweep(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor]:
            stable = stabilize(i, f, cu_seqlens=cu)
            k = k * stable.log_gain.exp().to(dtype).unsqueeze(-1)
            sums = linear_attention(
                q, k, v, causal=True, log_decay=stable.log_decay, decay_index="query", normalizer=None, cu_seqlens=cu,
                impl=impl,
            )  # fmt: skip
            return sums, stable.log_scale

        one, m_one = sweep(q, k, values, i, f, cu_seqlens)
        reversed_cu = None if cu_seqlens is None else k.shape[2] - cu_seqlens.flip(0)
        back = [x.flip(2) for x in (q, k, values, i, f)]
        two, m_two = (x.flip(2) for x in sweep(back[0], back[1], back[2], back[3], back[4], reversed_cu))
        m = torch.maximum(m_one, m_two)
        m = torch.where(m == -torch.inf, 0.0, m)  # no token is real
        own = (q * k.repeat_interleave(group, dim=1)).sum(-1, keepdim=True) * values.repeat_interleave(group, dim=1)
        total = weigh(one, m_one - m) + weigh(two, m_two - m) - weigh(own, i - m)
        bound = EXPONENT_BOUND[dtype]
        least = weigh(torch.ones_like(total[..., :1]), (-m).clamp(-bound, bound))
        return (total[..., :-1] / torch.maximum(total[..., -1:].abs(), least)).to(out_dtype)
