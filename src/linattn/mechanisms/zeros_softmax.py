"""ZeroS-SM: softmax attention with a gate for each of its orders."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, Mechanism, MechanismOutput
from linattn.mechanisms.common.tokens import sum_over_tokens
from linattn.mechanisms.registry import create_mechanism, register_mechanism
from linattn.ops.linear.api import linear_attention_with_state
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import compute_dtype, num_sequences, output_dtype, without_autocast
from linattn.ops.shared.types import LinearState


class ZerosSoftmaxState(NamedTuple):
    """State of ZeroS-SM: all keys and values so far, as in ``SoftmaxState``, and two sums.

    ``kv (N, H_kv, D+1, D)`` and ``k (N, H_kv, D+1)`` are the sums of ``[k, 1] v`` and ``[k, 1]``, from which the mean
    score and the mean value are computed.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    kv: Tensor
    k: Tensor


@register_mechanism("zeros_softmax", paper="arXiv:2602.05230", year=2025, state="growing", cost="quadratic",
                    uses_input=True)  # fmt: skip
class ZerosSoftmax(Mechanism):
    """Quadratic softmax attention with gates on its zeroth, first and higher orders.

    ``o_t = sum_s w_ts v_s``, ``w_ts = g1_t d_ts / N + gh_t (softmax_s(z_ts) - 1/N - d_ts / N) + a g0_t / N``

    over the N visible keys, with ``z_ts = q_t . k_s / sqrt(D)`` and ``d_ts = z_ts - mean_s(z_ts)``. With all gates 1
    this is softmax attention, bit for bit. The unit gates ``1 + tanh(w . x_t + b)`` start at 1, with w = b = 0 and
    with a gradient, so that a trained softmax model loses nothing when it is converted. If ``zero_order`` (a) goes from
    1 to 0 in training, weights that sum to 0 remain. The softmax part is ``scaled_dot_product_attention``, the rest
    is a linear attention. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``, output
    ``(B, H, T, D)``; gates are per head.

    Paper: Lu et al., ZeroS: Zero-Sum Linear Attention for Efficient Transformers. Its appendix, which writes this form
    out, was not available; this is the paper's general formula with the logits of softmax attention and no cosine.
    State per kv head: ``2 T D`` numbers, the keys and values, and ``(D + 1)^2``.

    Args:
        gate: ``"unit"`` as above, or ``"sigmoid"`` of ``w . x_t + b`` as in the paper, where ``g0`` is a tanh.
        zero_order: a, at least 0, kept as a buffer: ``mechanism.zero_order.fill_(0.5)``. None: 1 for unit gates, 0 for
            sigmoid gates (the paper's experiments). If it is 0 at construction, there is no ``g0`` with parameters.
        impl: ``"auto"``, or ``"reference"``: both parts by their formulas.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("zeros_softmax", num_heads=2, head_dim=8, causal=True)
        >>> softmax = create_mechanism("softmax", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> torch.equal(mechanism(q, k, v, x=torch.randn(1, 5, 16)), softmax(q, k, v))
        True
    """

    impls: ClassVar[tuple[str, ...]] = ("auto", "reference")
    state_type: ClassVar[type] = ZerosSoftmaxState
    zero_order: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: Literal["unit", "sigmoid"] = "unit",
        zero_order: float | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        checks.check_choice("gate", gate, ("unit", "sigmoid"))
        start = float(gate == "unit") if zero_order is None else zero_order
        checks.check_number("zero_order", start, least=0)
        self.gate = gate
        self.register_buffer("zero_order", torch.tensor(float(start)))
        self.softmax = create_mechanism(
            "softmax", num_heads=num_heads, head_dim=head_dim, num_kv_heads=self.num_kv_heads, causal=self.causal,
            impl=self.impl,
        )  # fmt: skip
        self.gate_map = nn.Linear(self.input_dim, num_heads * (3 if start else 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the gates; unit gates start at exactly 1."""
        self.gate_map.reset_parameters()
        if self.gate == "unit":
            nn.init.zeros_(self.gate_map.weight)
            nn.init.zeros_(self.gate_map.bias)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """``g1``, ``gh`` and ``a g0``: ``(B, H, T, 1)`` each, in fp32 or fp64."""
        logits = self.gate_map(x)
        logits = logits.to(compute_dtype(logits)).unflatten(2, (-1, self.num_heads)).unbind(2)
        activated = [1 + z.tanh() if self.gate == "unit" else z.sigmoid() for z in logits[:2]]
        if len(logits) == 3:
            zeroth = logits[2].tanh()
            activated.append(self.zero_order.to(zeroth.dtype) * (1 + zeroth if self.gate == "unit" else zeroth))
        g1, gh, *g0 = (gate.transpose(1, 2).unsqueeze(-1) for gate in activated)
        return g1, gh, g0[0] if g0 else 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        checks.check_size("q", "length", q.shape[2], k.shape[2], "k")
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        g1, gh, g0 = self.gates(self.input_of(call.x, k))
        out_dtype = output_dtype(v)  # of autocast too, which is off below
        state: ZerosSoftmaxState | None = call.state
        cache = None if state is None else self.softmax.state_type(*state[:3])
        exact = self.softmax.attend(q, k, v, replace(call, state=cache, x=None))
        with without_autocast(q):
            rest = self._low_orders(q, k, v, g1 - gh, g0 - gh, call)
            output = (gh * exact.output + rest.output).to(out_dtype)
        if not call.need_state:
            return MechanismOutput(output, None)
        return MechanismOutput(output, ZerosSoftmaxState(*exact.state, *rest.state))

    def _low_orders(self, q: Tensor, k: Tensor, v: Tensor, slope: Tensor, level: Tensor, call: Call) -> MechanismOutput:
        """``sum_s (slope_t (z_ts - mean_s z_ts) + level_t) v_s / N``, as a linear attention with key features [k, 1].

        The mean score is q times the mean key; the state's ``k`` holds the sum of the keys and their number.
        """
        dtype, start = compute_dtype(q, k, v), None
        if call.state is not None:
            shape = (num_sequences(k, call.cu_seqlens), self.num_kv_heads, self.head_dim + 1)
            checks.check_shape("state.kv", call.state.kv, (*shape, self.head_dim))
            checks.check_shape("state.k", call.state.k, shape)
            start = LinearState(call.state.kv.to(dtype), call.state.k.to(dtype))
        q, k, v = q.to(dtype) * self.head_dim**-0.5, k.to(dtype), v.to(dtype)
        psi = torch.cat([k, torch.ones_like(k[..., :1])], dim=-1)
        sums = sum_over_tokens(psi, call, causal=self.causal, initial=None if start is None else start.k)
        sums = sums.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        count = sums[..., -1:].clamp(min=1)
        mean_score = (q * sums[..., :-1]).sum(-1, keepdim=True) / count
        phi = torch.cat([slope * q, level - slope * mean_score], dim=-1) / count
        options: dict[str, Any] = {"causal": self.causal, "key_mask": call.key_mask, "cu_seqlens": call.cu_seqlens}
        options |= {"impl": call.impl, "initial_state": start, "normalizer": None}
        return MechanismOutput(*linear_attention_with_state(phi, psi, v, **options))

    def state_size(self, length: int) -> int:
        return self.softmax.state_size(length) + self.num_kv_heads * (self.head_dim + 1) ** 2

    def flops(self, length: int) -> int:
        """Counts softmax attention, a linear attention with D + 1 features, and the gates."""
        products = (self.num_heads + self.num_kv_heads) * 2 * (self.head_dim + 1) * self.head_dim
        return self.softmax.flops(length) + length * (products + 2 * self.gate_map.weight.numel())
