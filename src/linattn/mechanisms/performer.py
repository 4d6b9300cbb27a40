"""Performer: random features of the exponential kernel."""

import math
from dataclasses import replace
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Generator, Tensor

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput
from linattn.mechanisms.common.tokens import hide_logits, max_over_tokens
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.exponential.chunked import stabilize
from linattn.ops.shared.call import check_integer, check_shape, compute_dtype, num_sequences, without_autocast
from linattn.ops.shared.types import LinearState


class PerformerState(NamedTuple):
    """State of Performer: ``kv (N, H_kv, F, D)`` and ``k (N, H_kv, F)`` in units of ``exp(log_scale (N, H_kv, F))``."""

    kv: Tensor
    k: Tensor
    log_scale: Tensor


@register_mechanism("performer", paper="arXiv:2009.14794", year=2020)
class Performer(LinearBase):
    """Softmax attention approximated by positive orthogonal random features (FAVOR+).

    ``o_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s)``,
    ``phi(x) = exp(w_f . y - |y|^2 / 2) / sqrt(F)``, ``y = x / D^(1/4)``, ``w_f ~ N(0, I)``, f = 1..F

    so that ``E phi(q).phi(k) = exp(q.k / sqrt(D))``. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output
    ``(B, H, T, D)``. The w_f of a kv head are orthogonal in blocks of D, and a buffer: checkpoints keep them.

    Sums are kept per feature in units of the largest term so far (causal) or of the sequence (bidirectional). So no
    denominator is ever below 1, whatever the lengths of the vectors, and later tokens do not change earlier outputs.

    Paper: Choromanski et al., Rethinking Attention with Performers. State per kv head: ``F (D + 2)`` numbers.

    Args:
        num_features: F; None: ``D log D``, rounded, as the paper's theory requires.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("performer", num_heads=2, head_dim=8, num_features=32)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
        >>> mechanism.redraw()  # new random features; the paper does this every thousand steps or so
    """

    state_type: ClassVar[type] = PerformerState
    directions: Tensor  # (H_kv, F, D)

    def __init__(
        self, num_heads: int, head_dim: int, *, num_features: int | None = None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        if num_features is None:
            num_features = max(1, round(head_dim * math.log(head_dim)))
        check_integer("num_features", num_features)
        self.register_buffer("directions", torch.empty(self.num_kv_heads, num_features, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.redraw()

    def redraw(self, generator: Generator | None = None) -> None:
        """Draw new random features in place."""
        heads, features, D = self.directions.shape
        blocks = -(-features // D)
        gaussian = torch.randn(heads, blocks, D, D, generator=generator, dtype=torch.float64)
        rotation, triangle = torch.linalg.qr(gaussian)
        # With a positive diagonal the factorisation is unique, and the rotation is uniform over all rotations.
        rotation = rotation * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        norms = torch.randn(heads, blocks, D, D, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
        rows = (rotation.mT * norms).flatten(1, 2)[:, :features]
        with torch.no_grad():
            self.directions.copy_(rows)

    def log_features(self, x: Tensor) -> Tensor:
        """``log(sqrt(F) phi(x))``: ``(B, H or H_kv, T, D) -> (.., F)``, in fp32 or fp64."""
        y = x.to(compute_dtype(x)) * self.head_dim**-0.25
        return self._along_directions(x) - y.square().sum(-1, keepdim=True) / 2

    def _along_directions(self, x: Tensor) -> Tensor:
        y = x.to(compute_dtype(x)) * self.head_dim**-0.25
        with without_autocast(x):  # these are exponents
            return (y.unflatten(1, (self.num_kv_heads, -1)) @ self.directions.to(y.dtype).mT.unsqueeze(1)).flatten(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        log_k = hide_logits(self.log_features(k), call)
        arguments = {"v": v, "eps": 1e-12}  # denominators are at least 1: eps only serves queries that see no key
        final = log_k.new_empty(0)
        if self.causal:
            features, log_decay, log_scale, final = self._running(log_k, call)
            arguments["log_decay"] = log_decay
        else:
            log_scale = max_over_tokens(log_k, call)
            features = (log_k - log_scale).exp()
        # |q|^2 and the largest term of a query are common factors of its numerator and denominator.
        log_q = self._along_directions(q).unflatten(1, (self.num_kv_heads, -1)) + log_scale.unsqueeze(2)
        log_q = (log_q - log_q.detach().amax(-1, keepdim=True)).flatten(1, 2)
        arguments |= {"q": log_q.exp().to(q.dtype), "k": features.to(k.dtype)}
        state: PerformerState | None = call.state
        linear_state = None if state is None else LinearState(state.kv, state.k)
        out = self.linear(replace(call, state=linear_state), arguments)
        if not call.need_state:
            return out
        return MechanismOutput(out.output, PerformerState(out.state.kv, out.state.k, final))

    def _running(self, log_k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Key features in units of the largest term so far, decay and scale ``(B, H_kv, T, F)``, and the last scale."""
        H_kv, features = log_k.shape[1], log_k.shape[3]
        initial = None
        if call.state is not None:
            shape = (num_sequences(log_k, call.cu_seqlens), H_kv, features)
            check_shape("state.log_scale", call.state.log_scale, shape)
            initial = call.state.log_scale.flatten(1)
        # Every feature has its own maximum, as if it were a head.
        safe = stabilize(log_k.transpose(2, 3).flatten(1, 2), None, initial, call.cu_seqlens)
        gain, decay, scale = (
            x.unflatten(1, (H_kv, features)).transpose(2, 3) for x in (safe.log_gain, safe.log_decay, safe.log_scale)
        )
        scale = scale.masked_fill(scale == -torch.inf, 0).to(log_k.dtype)
        final = safe.final_log_scale.unflatten(1, (H_kv, features)).to(log_k.dtype)
        return gain.exp().to(log_k.dtype), decay, scale, final

    @property
    def num_features(self) -> int:
        return self.directions.shape[1]

    def state_size(self, length: int) -> int:
        return super().state_size(length) + self.num_kv_heads * self.num_features

    def flops(self, length: int) -> int:
        projections = 2 * length * (self.num_heads + self.num_kv_heads) * self.num_features * self.head_dim
        return super().flops(length) + projections
