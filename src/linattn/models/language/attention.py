"""Attention over a sequence of tokens: rotary positions, Canon on q, k and v, and a state for decoding."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from linattn.layers.canon import canon_at
from linattn.layers.gate import OutputGate
from linattn.layers.norms import OutputNorm, create_norm
from linattn.layers.plane import wipe
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism
from linattn.models.language.options import BlockOptions
from linattn.models.language.rotary import turn
from linattn.models.language.tokens import BlockState, Tokens


class Heads(NamedTuple):
    """q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``."""

    q: Tensor
    k: Tensor
    v: Tensor


class SequenceAttention(nn.Module):
    """``y = W_o (norm(mechanism(turn(q), turn(k), v)) * gate(x))``, ``[q, k, v] = canon_b(W_qkv x)``

    x ``(B, T, C)`` to ``(B, T, C)``. Canon comes after the norms of q and k and before the rotation (``turn``). The
    parameters are those of ``linattn.layers.Attention``, which is for images; this layer is for sequences.
    """

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.options = options
        self.head_dim, self.rotary_width = options.head_dim, options.rotary_width
        self.widths = [options.dim, *[options.num_kv_heads * options.head_dim] * 2]
        self.qkv = nn.Linear(options.dim, sum(self.widths), bias=options.qkv_bias)
        self.q_norm = None if options.qk_norm is None else create_norm(options.qk_norm, self.head_dim)
        self.k_norm = None if options.qk_norm is None else create_norm(options.qk_norm, self.head_dim)
        self.canon = canon_at("B", options.canon_positions, sum(self.widths), options.canon_kernel)
        self.mechanism = self.new_mechanism()
        kind = options.attention_norm
        self.norm = None if kind is None else OutputNorm(options.num_heads, self.head_dim, kind)
        gate = options.attention_gate
        self.gate = None if gate is None else OutputGate(options.dim, options.dim, gate)
        self.proj = nn.Linear(options.dim, options.dim, bias=options.proj_bias)

    def new_mechanism(self) -> Mechanism:
        """A new mechanism as the options describe it, initialised as in its paper."""
        options = self.options
        return create_mechanism(
            options.mechanism, num_heads=options.num_heads, head_dim=options.head_dim,
            num_kv_heads=options.num_kv_heads, causal=options.causal, impl=options.impl, input_dim=options.dim,
            **options.mechanism_options,
        )  # fmt: skip

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        x = wipe(x, tokens.key_mask)
        joined = self._project(x)
        if self.canon is not None:
            joined = self.canon(joined, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)
        q, k, v = self._heads(joined, tokens)
        out = self.mechanism(q, k, v, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens, x=self._gate_input(x))
        return self._finish(out, x)

    def with_state(self, x: Tensor, tokens: Tokens, state: BlockState | None) -> tuple[Tensor, BlockState]:
        """Attend from a state (None: empty). The state returned has the parts of the mechanism and of Canon b alone."""
        x = wipe(x, tokens.key_mask)
        joined, canon_state = self._project(x), None
        if self.canon is not None:
            joined, canon_state = self.canon.with_state(
                joined, state=None if state is None else state.canon_b, key_mask=tokens.key_mask,
                cu_seqlens=tokens.cu_seqlens,
            )  # fmt: skip
        q, k, v = self._heads(joined, tokens)
        gate_input = self._gate_input(x)
        if state is not None and x.shape[1] == 1 and tokens.key_mask is None and tokens.cu_seqlens is None:
            token = None if gate_input is None else gate_input.squeeze(1)
            out, new = self.mechanism.step(q.squeeze(2), k.squeeze(2), v.squeeze(2), state.mechanism, x=token)
            out = out.unsqueeze(2)
        else:
            out, new = self.mechanism.with_state(
                q, k, v, state=None if state is None else state.mechanism, key_mask=tokens.key_mask,
                cu_seqlens=tokens.cu_seqlens, x=gate_input,
            )  # fmt: skip
        return self._finish(out, x), BlockState(new, canon_b=canon_state)

    def _project(self, x: Tensor) -> Tensor:
        """q, k and v side by side ``(B, T, (H + 2 H_kv) D)``, with q and k normed if there is a ``qk_norm``."""
        joined: Tensor = self.qkv(x)
        if self.q_norm is None or self.k_norm is None:
            return joined
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in joined.split(self.widths, dim=-1))
        return torch.cat([part.flatten(2) for part in (self.q_norm(q), self.k_norm(k), v)], dim=-1)

    def _heads(self, joined: Tensor, tokens: Tokens) -> Heads:
        if not self.rotary_width:
            return Heads(*(self._of_heads(part) for part in joined.split(self.widths, dim=-1)))
        if self.rotary_width not in tokens.rotations:
            raise ValueError(f"tokens.rotations must have the rotation of {self.rotary_width} channels, and has none")
        # q and k lie side by side and are turned as one: the time of a small model's step is the number of its kernels.
        both, v = (self._of_heads(part) for part in joined.split([sum(self.widths[:2]), self.widths[2]], dim=-1))
        turned = turn(both, tokens.rotations[self.rotary_width])
        q, k = turned.split([self.options.num_heads, self.options.num_kv_heads], dim=1)
        return Heads(q, k, v)

    def _of_heads(self, part: Tensor) -> Tensor:
        """``(B, T, H D)`` to ``(B, H, T, D)``."""
        return part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _gate_input(self, x: Tensor) -> Tensor | None:
        return x if self.mechanism.info.uses_input else None

    def _finish(self, out: Tensor, x: Tensor) -> Tensor:
        out = out.transpose(1, 2).flatten(2)
        if self.norm is not None:
            out = self.norm(out)
        if self.gate is not None:
            out = self.gate(out, x)
        return self.proj(out)
