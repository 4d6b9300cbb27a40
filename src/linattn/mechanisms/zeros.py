"""ZeroS: weights that sum to zero, in linear time."""

from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, Mechanism, MechanismOutput, check_length
from linattn.mechanisms.common.directions import direction_of, output_dtype
from linattn.mechanisms.common.over_tokens import count_tokens, exp_over_tokens, sum_over_tokens
from linattn.mechanisms.common.positions import token_positions
from linattn.mechanisms.registry import register_mechanism
from linattn.ops import checks
from linattn.ops.linear import linear_attention_with_state
from linattn.ops.packing import compute_dtype, num_sequences
from linattn.ops.prepare import without_autocast
from linattn.ops.stabilizer import stabilize
from linattn.ops.types import LinearState

LOGITS = ("deviation", "quadratic", "mean", "l1", "rms")
LOG_TAU_RANGE = (-50.0, 30.0)
NORM_EPS = 1e-5
START_STD = 0.02
# The largest exponential is 1 in its own unit: this is for rows that have seen no token at all.
NOTHING = 1e-30


class ZerosState(NamedTuple):
    """Sums over the tokens so far, one row per sequence; those with ``e^z`` in units of ``e^{log_scale}``.

    ``exp_kv (N, H_kv, D, D)`` and ``exp_sum (N, H_kv, 1)``: of ``e^z k v`` and ``e^z``; ``kv (N, H_kv, 2D, D)``: of
    ``[z k, k] v``; ``logits (N, H_kv, 1)`` and ``u (N, H_kv, D)``: of z and u; ``position (N,)``: real tokens seen.
    """

    exp_kv: Tensor
    exp_sum: Tensor
    log_scale: Tensor
    kv: Tensor
    logits: Tensor
    u: Tensor
    position: Tensor


@register_mechanism("zeros", paper="arXiv:2602.05230", year=2025, uses_input=True)
class Zeros(Mechanism):
    """Zero-sum weights: softmax of a logit per key without its average, times a cosine.

    ``o_t = norm(sum_s r_ts cos(q_t, k_s) v_s)``, over the N visible keys: ``s <= t`` (N = t) when causal, else all

    ``r_ts = g1_t d_ts / N + gh_t (softmax_s(z_s) - 1/N - d_ts / N) [+ g0_t / N]``, ``d_ts = z_s - mean_s(z_s)``

    The logit of a key is ``z_s = -u_s . m_s / sqrt(D)`` with ``u_s = W_u x_s`` and ``m_s`` the mean of u over the keys
    that s sees, and of a prior ``mu`` that counts ``e^tau`` tokens. ``g1 = sigmoid(w_1 . x_t + b_1)`` and ``gh`` alike
    are the gates of the first and the higher orders of softmax; without the zeroth order ``r`` sums to 0 (its product
    with the cosine need not), and a first causal token gives 0. A constant added to all logits changes nothing. The
    exponentials are in units of a running maximum: no later logit, however large, moves what came before.

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``, output ``(B, H, T, D)``; logits are per kv
    head, gates per head. Rotary positions turn q and k (the paper's ``q R_{t-s} k``); they come from the layer, and are
    true rotations, which those of the published code are not. That code divides the bidirectional mean by a key's
    position; here it is the mean over all keys, as the formula says.

    Paper: Lu et al., ZeroS: Zero-Sum Linear Attention for Efficient Transformers. State per kv head: ``3 D^2 + D + 3``
    numbers.

    Args:
        logit: ``"deviation"`` as above, or of the official code: ``"quadratic"`` (``|u|^2 / D``), ``"mean"`` (of u's
            channels), ``"l1"`` and ``"rms"`` (mean and root mean square distance of u from m).
        zero_order: ``g0`` of the bracketed term, for a first layer: ``"tanh"`` (the official code) or ``"sigmoid"`` of
            ``w_0 . x_t + b_0``; None: no such term, as in the paper's experiments.
        head_norm: ``norm`` is LayerNorm over the channels of a head, without weights, which the paper puts in the
            place of a factor ``1/sqrt(t)``; False: no norm.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("zeros", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> output = mechanism(q, k, v, x=torch.randn(1, 5, 16))
        >>> output.shape, output[:, :, 0].abs().max().item()
        (torch.Size([1, 2, 5, 8]), 0.0)
    """

    state_type: ClassVar[type] = ZerosState

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        logit: Literal["deviation", "quadratic", "mean", "l1", "rms"] = "deviation",
        zero_order: Literal["tanh", "sigmoid"] | None = None,
        head_norm: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        checks.check_choice("logit", logit, LOGITS)
        checks.check_choice("zero_order", zero_order, (None, "tanh", "sigmoid"))
        if not isinstance(head_norm, bool):
            raise TypeError(f"head_norm must be True or False, got {head_norm!r}")
        self.logit, self.zero_order, self.head_norm = logit, zero_order, head_norm
        self.u_map = nn.Linear(self.input_dim, self.num_kv_heads * head_dim)
        self.gate_map = nn.Linear(self.input_dim, num_heads * (2 if zero_order is None else 3))
        has_mean = logit in ("deviation", "l1", "rms")
        self.prior_mu = nn.Parameter(torch.empty(self.num_kv_heads, head_dim)) if has_mean else None
        self.prior_log_tau = nn.Parameter(torch.empty(self.num_kv_heads)) if has_mean else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Logits start near one another, so that weights and output start near 0; the prior is one token at 0.

        ``N(0, 0.02^2)`` is the official code's start as in GPT-2. PyTorch's own is as small only at 800 channels: at 64
        the logits are 13 times as far apart, and the norm makes outputs ten times as large of what is noise yet.
        """
        for linear in (self.u_map, self.gate_map):
            nn.init.normal_(linear.weight, std=START_STD)
            nn.init.zeros_(linear.bias)
        for prior in (self.prior_mu, self.prior_log_tau):
            if prior is not None:
                nn.init.zeros_(prior)

    def logits(self, u: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """``z (B, H_kv, T, 1)`` from ``u (B, H_kv, T, D)``, and the sum and the number of the keys in its mean."""
        if self.prior_mu is None or self.prior_log_tau is None:
            return u.square().mean(-1, keepdim=True) if self.logit == "quadratic" else u.mean(-1, keepdim=True)
        weight = self.prior_log_tau.to(u.dtype).clamp(*LOG_TAU_RANGE).exp()[:, None, None]
        mean = (weight * self.prior_mu.to(u.dtype).unsqueeze(1) + total) / (weight + count)
        if self.logit == "deviation":
            return -(u * mean).sum(-1, keepdim=True) * self.head_dim**-0.5
        away = u - mean
        if self.logit == "l1":
            return away.abs().mean(-1, keepdim=True)
        return (away.square().mean(-1, keepdim=True) + 1e-12).sqrt()  # has a slope at 0

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """``g1``, ``gh`` and, with a zeroth order, ``g0``: ``(B, H, T, 1)`` each, in fp32 or fp64."""
        logits = self.gate_map(x)
        first, higher, *zeroth = logits.to(compute_dtype(logits)).unflatten(2, (-1, self.num_heads)).unbind(2)
        g1, gh = (gate.sigmoid().transpose(1, 2).unsqueeze(-1) for gate in (first, higher))
        if not zeroth:
            return g1, gh, None
        g0 = zeroth[0].tanh() if self.zero_order == "tanh" else zeroth[0].sigmoid()
        return g1, gh, g0.transpose(1, 2).unsqueeze(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        checks.check_size("q", "length", q.shape[2], k.shape[2], "k")
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        x, out_dtype = self.input_of(call.x, k), output_dtype(q, v)
        u = self.u_map(x).unflatten(2, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        gates = self.gates(x)
        with without_autocast(q):
            dtype = compute_dtype(q, k, v)
            q, k, v, u = direction_of(q), direction_of(k), v.to(dtype), u.to(dtype)
            out = (self._causal if self.causal else self._encoder)(q, k, v, u, gates, call)
            output = F.layer_norm(out.output, (self.head_dim,), eps=NORM_EPS) if self.head_norm else out.output
        return MechanismOutput(output.to(out_dtype), out.state)

    def _encoder(
        self, q: Tensor, k: Tensor, v: Tensor, u: Tensor, gates: tuple[Tensor, Tensor, Tensor | None], call: Call
    ) -> MechanismOutput:
        """The factors of the gates in r are numbers of the key alone: so many times D features, no scan."""
        g1, gh, g0 = gates
        count = count_tokens(k.shape[2], call, u)
        z = self.logits(u, sum_over_tokens(u, call), count)
        first = (z - sum_over_tokens(z, call) / count) / count
        weight = exp_over_tokens(z, call)
        higher = weight / (sum_over_tokens(weight, call) + NOTHING) - 1 / count - first
        pairs = [(g1, first), (gh, higher)]
        if g0 is not None:
            pairs.append((g0, torch.ones_like(z) / count))
        phi = torch.cat([gate * q for gate, _ in pairs], dim=-1)
        psi = torch.cat([factor * k for _, factor in pairs], dim=-1)
        return MechanismOutput(self._linear(phi, psi, v, call).output, None)

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, u: Tensor, gates: tuple[Tensor, Tensor, Tensor | None], call: Call
    ) -> MechanismOutput:
        """``r = gh e^z / E + (g1 - gh) (z - P/t) / t + (g0 - gh) / t``, E and P the sums of e^z and z so far."""
        (g1, gh, g0), state = gates, self._start(k, call)
        before, position = token_positions(k.shape[2], call.key_mask, call.cu_seqlens, state.position)
        t = (before + 1).to(u.dtype)[:, None, :, None]
        total, u_sum = self._running_sum(u, state.u, call)
        z = self.logits(u, total, t)
        sums, z_sum = self._running_sum(z, state.logits, call)
        # A single token is its own mean: its weight is 0, and would be 1e-8 after rounding.
        g1, gh = (gate.masked_fill(t == 1, 0) for gate in (g1, gh))

        log_input = z.squeeze(-1)
        if call.key_mask is not None:
            log_input = log_input.masked_fill(~call.key_mask.unsqueeze(1), -torch.inf)
        stable = stabilize(log_input, None, state.log_scale, call.cu_seqlens)
        gain = stable.log_gain.exp().to(u.dtype).unsqueeze(-1)
        exponential = self._linear(
            gh * q, gain * k, v, call, log_decay=stable.log_decay, decay_index="query", normalizer="sum", eps=NOTHING,
            norm_features=(torch.ones_like(q[..., :1]), gain), initial_state=LinearState(state.exp_kv, state.exp_sum),
        )  # fmt: skip
        slope = (g1 - gh) / t
        level = (-gh if g0 is None else g0 - gh) / t
        mean = (sums / t).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        phi = torch.cat([slope * q, (level - slope * mean) * q], dim=-1)
        unused = state.kv.new_zeros(state.kv.shape[:3])
        psi = torch.cat([z * k, k], dim=-1)
        rest = self._linear(phi, psi, v, call, initial_state=LinearState(state.kv, unused))
        output = exponential.output + rest.output
        if not call.need_state:
            return MechanismOutput(output, None)
        scale = stable.final_log_scale.to(u.dtype)  # exact: logits have that dtype
        exp_kv, exp_sum = exponential.state
        return MechanismOutput(output, ZerosState(exp_kv, exp_sum, scale, rest.state.kv, z_sum, u_sum, position))

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, call: Call, **options: Any) -> MechanismOutput:
        common = {"causal": self.causal, "key_mask": call.key_mask, "cu_seqlens": call.cu_seqlens, "impl": call.impl}
        return MechanismOutput(*linear_attention_with_state(q, k, v, **common | {"normalizer": None} | options))

    def _running_sum(self, x: Tensor, initial: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Of ``x (B, H_kv, T, F)`` from ``initial (N, H_kv, F)`` on: at every token, and after each sequence."""
        start = LinearState(initial.unsqueeze(2), initial.new_zeros(*initial.shape[:2], 1))
        one = torch.ones_like(x[..., :1])
        output, state = self._linear(one, one, x, call, initial_state=start)
        return output, state.kv.squeeze(2)

    def _start(self, k: Tensor, call: Call) -> ZerosState:
        """The state to start from, checked, or an empty one."""
        n, H, D, dtype = num_sequences(k, call.cu_seqlens), self.num_kv_heads, self.head_dim, compute_dtype(k)
        shapes = ((n, H, D, D), (n, H, 1), (n, H), (n, H, 2 * D, D), (n, H, 1), (n, H, D))
        if call.state is None:
            empty = [torch.zeros(shape, dtype=dtype, device=k.device) for shape in shapes]
            empty[2] = empty[2] - torch.inf
            empty.append(torch.zeros(n, dtype=torch.long, device=k.device))
            return ZerosState(*empty)
        state: ZerosState = call.state
        for name, part, shape in zip(ZerosState._fields, state, (*shapes, (n,)), strict=True):
            checks.check_shape(f"state.{name}", part, shape)
            checks.check_device(f"state.{name}", part, k)
        return ZerosState(*(part.to(dtype) if part.is_floating_point() else part for part in state))

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * (3 * self.head_dim**2 + self.head_dim + 3) + 1

    def flops(self, length: int) -> int:
        """Sets of D features: causal three, else one per gate. Then u and the gates."""
        check_length(length)
        sets = 2 if self.zero_order is None and not self.causal else 3
        products = (self.num_heads + self.num_kv_heads) * 2 * self.head_dim**2 * sets
        maps = 2 * (self.u_map.weight.numel() + self.gate_map.weight.numel())
        return length * (products + maps)

    def extra_repr(self) -> str:
        own = f"logit={self.logit!r}, zero_order={self.zero_order!r}, head_norm={self.head_norm}"
        return f"{super().extra_repr()}, {own}"
