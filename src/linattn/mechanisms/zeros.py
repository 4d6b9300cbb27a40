"""ZeroS: weights that sum to zero, in linear time."""

from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, Mechanism, MechanismOutput, check_length
from linattn.mechanisms.common.tokens import count_tokens, exp_over_tokens, sum_over_tokens, token_positions
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.exponential.chunked import stabilize
from linattn.ops.linear.api import run
from linattn.ops.linear.call import LinearCall
from linattn.ops.maps.powers import direction_of
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import compute_dtype, num_sequences, output_dtype, without_autocast
from linattn.ops.shared.packing import sequence_of_tokens
from linattn.ops.shared.types import LinearState

LOGITS = ("deviation", "quadratic", "mean", "l1", "rms")
LOG_TAU_RANGE = (-50.0, 30.0)
NORM_EPS = 1e-5
# The largest distance of a sequence's first two logits at which the others are expected near them.
NEAR = 1.0
START_STD = 0.02
# The largest exponential is 1 in its own unit, so this only matters for rows that have seen no token at all.
NOTHING = 1e-30


class ZerosState(NamedTuple):
    """State of ZeroS: sums over the tokens so far, one row per sequence.

    ``exp_kv (N, H_kv, D, D)`` and ``exp_sum (N, H_kv, 1)`` sum ``e^z k v`` and ``e^z``, in units of
    ``e^{log_scale (N, H_kv)}``; ``kv (N, H_kv, D, 2D)`` sums ``k [z v, v]``; ``logits (N, H_kv, 1)`` and
    ``u (N, H_kv, D)`` sum z and u; ``position (N,)`` counts the real tokens seen.
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
    """Linear attention with zero-sum weights (a softmax of key logits minus its average) times a cosine.

    ``o_t = norm(sum_s r_ts cos(q_t, k_s) v_s)``, over the N visible keys: ``s <= t`` (N = t) when causal, else all

    ``r_ts = g1_t d_ts / N + gh_t (softmax_s(z_s) - 1/N - d_ts / N) [+ g0_t / N]``, ``d_ts = z_s - mean_s(z_s)``

    The logit of a key is ``z_s = -u_s . m_s / sqrt(D)`` with ``u_s = W_u x_s`` and ``m_s`` the mean of u over the keys
    that s sees and a prior ``mu`` that counts as ``e^tau`` tokens. ``g1 = sigmoid(w_1 . x_t + b_1)`` and a ``gh`` of
    the same form are the gates of the first and the higher orders of softmax. Without the zeroth order ``r`` sums to 0
    (its product with the cosine need not), and the output of the first causal token is 0. A constant added to all
    logits changes nothing. The exponentials are in units of a running maximum: no later logit, however large, changes
    earlier outputs.

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``, output ``(B, H, T, D)``; logits are per kv
    head, gates per head. Rotary positions (the paper's ``q R_{t-s} k``) turn q and k; they come from the layer and are
    true rotations, unlike those of the published code. That code also divides the bidirectional mean by a key's
    position; here it is the mean over all keys, as in the formula.

    Paper: Lu et al., ZeroS: Zero-Sum Linear Attention for Efficient Transformers. State per kv head: ``3 D^2 + D + 3``
    numbers.

    Args:
        logit: ``"deviation"`` as above, or one of the official code's: ``"quadratic"`` (``|u|^2 / D``), ``"mean"`` (of
            u's channels), ``"l1"`` and ``"rms"`` (mean absolute and root mean square difference of u from m).
        zero_order: the gate ``g0`` of the bracketed term, for a first layer: ``"tanh"`` (the official code) or
            ``"sigmoid"`` of ``w_0 . x_t + b_0``; None: no such term, as in the paper's experiments.
        head_norm: whether ``norm`` is a LayerNorm over the channels of a head, without weights, which the paper uses in
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
        checks.check_flag("head_norm", head_norm)
        self.logit, self.zero_order, self.head_norm = logit, zero_order, head_norm
        self.u_map = nn.Linear(self.input_dim, self.num_kv_heads * head_dim)
        self.gate_map = nn.Linear(self.input_dim, num_heads * (2 if zero_order is None else 3))
        has_mean = logit in ("deviation", "l1", "rms")
        self.prior_mu = nn.Parameter(torch.empty(self.num_kv_heads, head_dim)) if has_mean else None
        self.prior_log_tau = nn.Parameter(torch.empty(self.num_kv_heads)) if has_mean else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with logits near one another, so that weights and output are near 0; the prior is one token at 0.

        The official code starts with ``N(0, 0.02^2)``, as GPT-2. PyTorch's default is as small only at 800 channels: at
        64 channels its logits are 13 times as far apart, and the norm makes outputs ten times as large of mere noise.
        """
        for linear in (self.u_map, self.gate_map):
            nn.init.normal_(linear.weight, std=START_STD)
            nn.init.zeros_(linear.bias)
        for prior in (self.prior_mu, self.prior_log_tau):
            if prior is not None:
                nn.init.zeros_(prior)

    def logits(self, u: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """``z (B, H_kv, T, 1)`` from ``u (B, H_kv, T, D)`` and the sum and count of the keys in the mean of u."""
        if self.prior_mu is None or self.prior_log_tau is None:
            return u.square().mean(-1, keepdim=True) if self.logit == "quadratic" else u.mean(-1, keepdim=True)
        weight = self.prior_log_tau.to(u.dtype).clamp(*LOG_TAU_RANGE).exp()[:, None, None]
        total, count = weight * self.prior_mu.to(u.dtype).unsqueeze(1) + total, weight + count
        if self.logit == "deviation":
            return (u * total).sum(-1, keepdim=True) * -(self.head_dim**-0.5) / count
        away = u - total / count
        if self.logit == "l1":
            return away.abs().mean(-1, keepdim=True)
        return (away.square().mean(-1, keepdim=True) + 1e-12).sqrt()  # 1e-12: the gradient at 0 is finite

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """``g1``, ``gh`` and, with a zeroth order, ``g0``: ``(B, H, T, 1)`` each, in fp32 or fp64."""
        logits = self.gate_map(x)
        logits = logits.to(compute_dtype(logits)).unflatten(2, (-1, self.num_heads, 1)).transpose(1, 3)
        first, higher, *zeroth = logits.sigmoid().unbind(2)
        if self.zero_order == "tanh":
            zeroth = [logits[:, :, 2].tanh()]
        return first, higher, zeroth[0] if zeroth else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        checks.check_size("q", "length", q.shape[2], k.shape[2], "k")
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        x, out_dtype = self.input_of(call.x, k), output_dtype(v)
        u = self.u_map(x).unflatten(2, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        gates = self.gates(x)
        with without_autocast(q):
            dtype = compute_dtype(q, k, v)
            q, k, v, u = direction_of(q), direction_of(k), v.to(dtype), u.to(dtype)
            # With nearly equal logits little is left of e^z / E - 1 / t, and the 8 bits of bf16 would leave too much
            # noise on it. For a 16-bit output the 11 bits of tf32 suffice if the sums are centred. Sums of a state are
            # not centred, nor are those with a mask, since the first tokens may be padding.
            tf32 = out_dtype.itemsize == 2 and not call.need_state and call.key_mask is None and k.shape[2] > 1
            weigh = partial(self._causal, tf32=tf32) if self.causal else self._encoder
            out = weigh(q, k, v, u, gates, call)
            output = F.layer_norm(out.output, (self.head_dim,), eps=NORM_EPS) if self.head_norm else out.output
        return MechanismOutput(output.to(out_dtype), out.state)

    def _encoder(
        self, q: Tensor, k: Tensor, v: Tensor, u: Tensor, gates: tuple[Tensor, Tensor, Tensor | None], call: Call
    ) -> MechanismOutput:
        """Bidirectional attention. Each gate's factor in r depends on the key alone: D features per gate, no scan."""
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
        return MechanismOutput(self._linear(phi, psi, v, call)[0], None)

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, u: Tensor, gates: tuple[Tensor, Tensor, Tensor | None], call: Call, *,
        tf32: bool,
    ) -> MechanismOutput:  # fmt: skip
        """Causal attention: ``gh (F / E - H / t) + slope (G - P/t H) + g0/t H`` with ``slope = (g1 - gh) / t``.

        F, G and H are the sums of ``e^z``, z and 1 times ``q.k v``; E and P are those of ``e^z`` and z. For any r,
        ``F / E - H / t = (F' - E'/t H) / (E' + r t)`` where F' and E' have ``e^z - r``; for any c, z - c may replace z
        in G and P.
        """
        (g1, gh, g0), state = gates, self._checked_state(k, call)
        exp_kv, exp_sum, log_scale, kv, z_sum, u_sum, position = state or (None,) * len(ZerosState._fields)
        if position is None:
            position = torch.zeros(num_sequences(k, call.cu_seqlens), dtype=torch.long, device=k.device)
        before, position = token_positions(k.shape[2], call.key_mask, call.cu_seqlens, position)
        t = (before + 1).to(u.dtype)[:, None, :, None]
        # A single token is its own mean, so its weight is 0; rounding would make it 1e-8.
        several = (t > 1).to(u.dtype)
        total, u_sum = self._running_sum(u, u_sum, call)
        z = self.logits(u, total, t)

        log_input = z.squeeze(-1)
        if call.key_mask is not None:
            log_input = log_input.masked_fill(~call.key_mask.unsqueeze(1), -torch.inf)
        stable = stabilize(log_input, None, log_scale, call.cu_seqlens)
        weight, r = stable.log_gain.exp(), None
        if tf32:
            z, r = centred(z, stable.log_scale, call.cu_seqlens)
            weight = weight - r  # in fp64, so that the difference keeps all digits
            r = self._per_head(r.to(u.dtype).unsqueeze(-1))
        weight = weight.to(u.dtype).unsqueeze(-1)
        # Both sums are heads of one call; those of z do not decay.
        start = None if exp_sum is None or z_sum is None else torch.cat([exp_sum, z_sum], dim=1)
        decay = torch.cat([stable.log_decay, torch.zeros_like(stable.log_decay)], dim=1)
        sums, last = self._running_sum(torch.cat([weight, z], dim=1), start, call, log_decay=decay, decay_index="query")
        E, P = (self._per_head(x) for x in sums.chunk(2, dim=1))
        F_t, exp_kv = self._linear(
            q, k, weight * v, call, exp_kv, log_decay=stable.log_decay, decay_index="query", tf32=tf32
        )
        GH_t, kv = self._linear(q, k, torch.cat([z * v, v], dim=-1), call, kv, tf32=tf32)
        G_t, H_t = GH_t.chunk(2, dim=-1)
        # The largest exponential is 1 in its own unit: only rows that have seen no token at all have a smaller sum.
        higher = gh * several / (E if r is None else E + r * t).clamp(min=0.5)
        slope = (g1 - gh) * (several / t)
        level = (-higher * E if g0 is None else g0 - higher * E) / t - slope * (P / t)
        output = torch.addcmul(higher * F_t, slope, G_t).addcmul(level, H_t)
        if not call.need_state:
            return MechanismOutput(output, None)
        scale = stable.final_log_scale.to(u.dtype)  # exact: logits have that dtype
        exp_sum, z_sum = last.chunk(2, dim=1)
        return MechanismOutput(output, ZerosState(exp_kv, exp_sum, scale, kv, z_sum, u_sum, position))

    def _linear(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, start: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Any]:
        """Linear attention without a normaliser from the sums ``start (N, H_kv, K, V)``; final sums only if needed."""
        asked = LinearCall(
            q, k, v, self.causal, normalizer=None, key_mask=call.key_mask, cu_seqlens=call.cu_seqlens,
            initial_state=None if start is None else LinearState(start, start.new_zeros(start.shape[:3])),
            need_state=call.need_state, **options,
        )  # fmt: skip
        output, state = run(asked, call.impl)
        return output, state.kv if call.need_state else None

    def _running_sum(self, x: Tensor, start: Tensor | None, call: Call, **options: Any) -> tuple[Tensor, Any]:
        """Sums of ``x (B, H, T, F)`` from ``start (N, H, F)`` on: at every token, and after each sequence if needed.

        Never in tf32: what is left of terms that cancel is only as exact as these sums.
        """
        one = torch.ones_like(x[..., :1])
        start = None if start is None else start.unsqueeze(2)
        output, last = self._linear(one, one, x, call, start, **options)
        return output, last.squeeze(2) if call.need_state else None

    def _per_head(self, x: Tensor) -> Tensor:
        """``x (B, H_kv, T, F)`` repeated for every query head."""
        group = self.num_heads // self.num_kv_heads
        return x if group == 1 else x.repeat_interleave(group, dim=1)

    def _checked_state(self, k: Tensor, call: Call) -> ZerosState | None:
        """The state to start from, None for an empty one."""
        if call.state is None:
            return None
        n, H, D, dtype = num_sequences(k, call.cu_seqlens), self.num_kv_heads, self.head_dim, compute_dtype(k)
        shapes = ((n, H, D, D), (n, H, 1), (n, H), (n, H, D, 2 * D), (n, H, 1), (n, H, D), (n,))
        state: ZerosState = call.state
        for name, part, shape in zip(ZerosState._fields, state, shapes, strict=True):
            checks.check_shape(f"state.{name}", part, shape)
            checks.check_device(f"state.{name}", part, k)
        return ZerosState(*(part.to(dtype) if part.is_floating_point() else part for part in state))

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * (3 * self.head_dim**2 + self.head_dim + 3) + 1

    def flops(self, length: int) -> int:
        """Counts three sets of D features when causal, else one per gate, and the maps of u and the gates."""
        check_length(length)
        sets = 2 if self.zero_order is None and not self.causal else 3
        products = (self.num_heads + self.num_kv_heads) * 2 * self.head_dim**2 * sets
        maps = 2 * (self.u_map.weight.numel() + self.gate_map.weight.numel())
        return length * (products + maps)


def centred(z: Tensor, log_scale: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """``z - c`` and ``r = e^{c - m} (B, H_kv, T)``, where c is the smaller of a sequence's first two logits.

    Where logits are near one another, the sums that cancel are then as small as their difference. r must not be the
    larger part of many weights, so it is 0 if the first two logits are far apart. If these are alike and far above all
    others, digits are lost (6 above: outputs of bf16 are 1 % off instead of 0.2 %). No later token may take part in the
    choice of c, as it would change the noise of earlier outputs. The second token may, because the output of the first
    does not depend on c and r.
    """
    known = z.detach()
    if cu_seqlens is None:
        first, second = known[:, :, :1], known[:, :, 1:2]
    else:
        own, bounds = sequence_of_tokens(cu_seqlens, z.shape[2]), cu_seqlens.long()
        start = bounds[own]
        first, second = known[:, :, start], known[:, :, torch.minimum(start + 1, bounds[own + 1] - 1)]
    c, near = torch.minimum(first, second), (first - second).abs() <= NEAR
    return z - c, (c.squeeze(-1) - log_scale).exp() * near.squeeze(-1)
