"""``Attention``, for images and sequences: projections, a mechanism by name, and what papers put around it."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from linattn.layers import fold
from linattn.layers.attention_options import AttentionOptions
from linattn.layers.attention_parts import KeyPosition, LocalBranch, OutputGate, SpatialReduction
from linattn.layers.canon import canon_at
from linattn.layers.norms import OutputNorm, create_norm
from linattn.layers.plane import check_plane, mechanism_plane, wipe
from linattn.layers.rotary import SequenceRotary, plane_rotation, rotate_halves
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.shared import call as checks
from linattn.ops.shared.rotation import Rotate


class LayerOutput(NamedTuple):
    """Output of an attention layer, ``(B, T, C)``, or ``(B, C)`` for one step, and its state after it.

    The state is that of the mechanism, or with Canon an :class:`AttentionState`.
    """

    output: Tensor
    state: Any


class AttentionState(NamedTuple):
    """State of an attention layer with Canon: that of its mechanism, and the last tokens of its convolution."""

    mechanism: Any
    canon: ConvolutionState | None


class Attention(nn.Module):
    """Attention layer around any registered mechanism, with the optional parts that papers put around it.

    ``y = W_o (norm(mechanism(q, k, v) + local(v)) * gate(x))``, ``q, k, v = canon(W_qkv x)``

    x ``(B, T, C)`` to ``(B, T, C)``. Without optional parts it has the parameters of timm's ViT: ``qkv`` and ``proj``.
    Parts that look at the image plane need ``spatial_shape`` in the call, do not act on prefix tokens, and are refused
    with ``causal=True``. The positions of a sequence rotate q and k after their norms and Canon.

    Args:
        dim: C, width of the tokens.
        num_heads: number of query heads; must divide ``dim``.
        mechanism: name of the mechanism, see ``linattn.list_mechanisms()``.
        num_kv_heads: number of key and value heads (None: as many as query heads).
        causal: whether a token sees only itself and the past; needed for :meth:`with_state` and :meth:`step`.
        qkv_bias, proj_bias: whether the projections have biases.
        qk_norm: ``"layer"`` or ``"rms"``: norm over the channels of each head of q and k.
        key_position: grid ``(height, width)`` of a learned position embedding of k (FLatten, PolaFormer).
        rotary: 2-D rotary positions in the numerator: ``"features"``, over all channels of the features
            (PolaFormer++, RALA), or ``"blocks"``, over each block of ``head_dim`` of them separately (NaLaFormer).
            Or, for sequences, the share of a head's channels that are rotated before the mechanism, 0 to 1; the call
            then takes a ``rotation`` (``linattn.layers.rotary.rotations``) of ``rotary_width`` channels.
        local: depthwise convolution of v: ``"shared"``, with kernels that all heads share (FLatten, PolaFormer), or
            ``"channel"``, with one kernel per channel, LePE (NaLaFormer, RALA).
        local_kernel: width of this convolution, odd.
        norm: norm of the output, before the gate: ``"layer"``, ``"rms"``, or per head ``"head_layer"``, ``"head_rms"``.
        gate: ``"linear"`` or ``"silu"``: gate on the output, computed from x.
        spatial_reduction: n, to make keys and values from one token for every n x n of the plane (PVT).
        num_prefix_tokens: number of tokens before those of the plane, such as a class token. The mechanism is given the
            shape of the plane only if it knows of these tokens (LION, with the same ``num_prefix_tokens`` in
            ``mechanism_options``); any other mechanism takes all tokens as a line.
        canon, canon_kernel: ``"B"`` or ``"b"``: a Canon layer on q, k and v, as in ``linattn.layers.canon``, and the
            number of tokens it looks at.
        mechanism_options: the mechanism's own options.
        impl: form of the algebra, as in ``linear_attention``.

    Example:
        >>> import torch
        >>> from linattn.layers import Attention
        >>> layer = Attention(64, 4, "elu", local="channel", gate="silu", rotary="features")
        >>> layer(torch.randn(2, 12, 64), spatial_shape=(3, 4)).shape
        torch.Size([2, 12, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: str = "elu",
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        qkv_bias: bool = True,
        qk_norm: Literal["layer", "rms"] | None = None,
        key_position: tuple[int, int] | None = None,
        rotary: Literal["features", "blocks"] | float | None = None,
        local: Literal["shared", "channel"] | None = None,
        local_kernel: int = 5,
        norm: Literal["layer", "rms", "head_layer", "head_rms"] | None = None,
        gate: Literal["linear", "silu"] | None = None,
        spatial_reduction: int = 1,
        proj_bias: bool = True,
        num_prefix_tokens: int = 0,
        canon: Literal["B", "b"] | None = None,
        canon_kernel: int = 4,
        mechanism_options: Mapping[str, Any] | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        options = AttentionOptions(
            dim, num_heads, mechanism, num_kv_heads, causal, qkv_bias, qk_norm, key_position, rotary, local,
            local_kernel, norm, gate, spatial_reduction, proj_bias, num_prefix_tokens, canon, canon_kernel,
            mechanism_options or {}, impl,
        )  # fmt: skip
        options.check()
        self.options = options
        self.rotary_width, self.plane_parts = options.rotary_width, options.plane_parts
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.causal, self.num_prefix_tokens = causal, num_prefix_tokens
        kv_width = self.num_kv_heads * self.head_dim
        reduced = spatial_reduction > 1
        # Reduced keys and values are made from other tokens than queries, so they need a projection of their own.
        self.qkv = None if reduced else nn.Linear(dim, dim + 2 * kv_width, bias=qkv_bias)
        self.q = nn.Linear(dim, dim, bias=qkv_bias) if reduced else None
        self.kv = nn.Linear(dim, 2 * kv_width, bias=qkv_bias) if reduced else None
        self.reduction = SpatialReduction(dim, spatial_reduction, num_prefix_tokens) if reduced else None
        self.q_norm = None if qk_norm is None else create_norm(qk_norm, self.head_dim)
        self.k_norm = None if qk_norm is None else create_norm(qk_norm, self.head_dim)
        self.canon = canon_at("B", canon, dim + 2 * kv_width, canon_kernel)
        heads = (self.num_kv_heads, self.head_dim)
        self.key_position = None if key_position is None else KeyPosition(*heads, key_position)
        self.mechanism = self.new_mechanism()
        options.check_features(self.mechanism)
        self.local = None if local is None else LocalBranch(*heads, local, local_kernel)
        self.norm = None if norm is None else OutputNorm(num_heads, self.head_dim, norm)
        self.gate = None if gate is None else OutputGate(dim, dim, gate)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)

    def new_mechanism(self) -> Mechanism:
        """A new mechanism as the options describe it, initialised as in its paper."""
        options = self.options
        return create_mechanism(
            options.mechanism, num_heads=self.num_heads, head_dim=self.head_dim, causal=self.causal,
            num_kv_heads=self.num_kv_heads, impl=options.impl, input_dim=self.dim, **options.mechanism_options,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spatial_shape: tuple[int, int] | None = None,
        rotation: SequenceRotary | None = None,
    ) -> Tensor:
        """Attend: ``x (B, T, C)``; ``key_mask (B, T)``, True = real token; ``spatial_shape``, the tokens' plane."""
        x = self._checked(x, key_mask)
        part = self.plane_parts[0] if self.plane_parts else None
        if part is not None or spatial_shape is not None:
            check_plane(x.shape[1], spatial_shape, self.num_prefix_tokens, part or "the mechanism")
        if part is not None and cu_seqlens is not None:
            raise ValueError(f"cu_seqlens packs sequences into one row, where {part} finds no plane")
        key_shape = spatial_shape
        if self.qkv is not None:
            joined = self.qkv(x)
            if self.canon is not None:
                joined = self.canon(self._normed(joined), key_mask=key_mask, cu_seqlens=cu_seqlens)
            q, k, v = self._heads(joined, rotation)
        else:
            assert self.q is not None
            assert self.kv is not None
            assert self.reduction is not None
            assert spatial_shape is not None
            tokens, key_mask = self.reduction(x, spatial_shape=spatial_shape, key_mask=key_mask)
            key_shape = self.reduction.reduced_shape(spatial_shape)
            q, (k, v) = self._of_heads(self.q(x)), map(self._of_heads, self.kv(tokens).chunk(2, dim=-1))
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
        if self.key_position is not None:
            assert key_shape is not None
            k = self.key_position(k, spatial_shape=key_shape, num_prefix_tokens=self.num_prefix_tokens)
        out = self.mechanism(
            q, k, v, key_mask=key_mask, cu_seqlens=cu_seqlens, x=x if self.mechanism.info.uses_input else None,
            spatial_shape=mechanism_plane(self.mechanism, spatial_shape, self.num_prefix_tokens),
            rotate=self._plane_rotation(spatial_shape, key_shape),
        )  # fmt: skip
        if self.local is not None:
            assert key_shape is not None
            branch = self.local(
                v, spatial_shape=key_shape, output_shape=spatial_shape, key_mask=key_mask,
                num_prefix_tokens=self.num_prefix_tokens,
            )  # fmt: skip
            out = out + branch.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        return self._finish(out, x)

    def with_state(
        self,
        x: Tensor,
        *,
        state: Any = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotation: SequenceRotary | None = None,
    ) -> LayerOutput:
        """Attend from a state (None: empty) and also return the next state, for a prompt as a whole or in pieces."""
        x = self._checked(x, key_mask)
        assert self.qkv is not None  # a reduction looks at the plane, which is refused with causal=True
        joined, own, canon_state = self.qkv(x), state, None
        if self.canon is not None:
            own, past = (None, None) if state is None else state
            joined, canon_state = self.canon.with_state(
                self._normed(joined), state=past, key_mask=key_mask, cu_seqlens=cu_seqlens
            )
        q, k, v = self._heads(joined, rotation)
        gates = x if self.mechanism.info.uses_input else None
        if state is not None and x.shape[1] == 1 and key_mask is None and cu_seqlens is None:
            gates = None if gates is None else gates.squeeze(1)
            out, new = self.mechanism.step(q.squeeze(2), k.squeeze(2), v.squeeze(2), own, x=gates)
            out = out.unsqueeze(2)
        else:
            out, new = self.mechanism.with_state(q, k, v, state=own, key_mask=key_mask, cu_seqlens=cu_seqlens, x=gates)
        return LayerOutput(self._finish(out, x), new if self.canon is None else AttentionState(new, canon_state))

    def step(self, x: Tensor, state: Any, *, rotation: SequenceRotary | None = None) -> LayerOutput:
        """Decode one token: ``x (B, C)``."""
        checks.check_tensor("x", x, "(B, C), one token,", 2)
        out = self.with_state(x.unsqueeze(1), state=state, rotation=rotation)
        return LayerOutput(out.output.squeeze(1), out.state)

    def fold(self) -> "Attention":
        """Merge the mechanism's fixed reflection of q and k into their projections, in place, and return the layer.

        The outputs stay the same, and the reflection costs nothing any more. The mechanism must have a
        ``reflection_matrix`` and a ``without_reflection``. If they are missing or something stands between projection
        and reflection, the call raises an error before anything is changed.
        """
        fold.fold_reflection(self)
        return self

    def _checked(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        checks.check_tensor("x", x, "(B, T, C)", 3)
        checks.check_size("x", "width", x.shape[2], self.dim, "the layer's dim")
        if key_mask is None:
            return x
        checks.check_key_mask(key_mask, x.shape[0], x.shape[1], x)
        # Padding may hold anything; once wiped it cannot reach the gradient of a projection either.
        return wipe(x, key_mask)

    def _of_heads(self, part: Tensor) -> Tensor:
        """``(B, T, H D)`` to ``(B, H, T, D)``."""
        return part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _normed(self, joined: Tensor) -> Tensor:
        """``(B, T, (H + 2 H_kv) D)`` with the norms of q and k, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return joined
        kv = self.num_kv_heads * self.head_dim
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in joined.split([self.dim, kv, kv], dim=-1))
        return torch.cat([part.flatten(2) for part in (self.q_norm(q), self.k_norm(k), v)], dim=-1)

    def _heads(self, joined: Tensor, rotation: SequenceRotary | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, rotated, and normed unless Canon needed that before."""
        kv = self.num_kv_heads * self.head_dim
        if (rotation is None) != (self.rotary_width == 0):
            raise ValueError(f"rotation must be that of {self.rotary_width} channels (rotary={self.options.rotary!r})")
        if rotation is None:
            q, k, v = map(self._of_heads, joined.split([self.dim, kv, kv], dim=-1))
            if self.q_norm is not None and self.k_norm is not None and self.canon is None:
                q, k = self.q_norm(q), self.k_norm(k)
            return q, k, v
        # q and k lie side by side and are rotated as one: the time of a small model's step is that of its kernels.
        joined = joined if self.canon is not None else self._normed(joined)
        both, v = map(self._of_heads, joined.split([self.dim + kv, kv], dim=-1))
        q, k = rotate_halves(both, rotation).split([self.num_heads, self.num_kv_heads], dim=1)
        return q, k, v

    def _plane_rotation(
        self, spatial_shape: tuple[int, int] | None, key_shape: tuple[int, int] | None
    ) -> Rotate | None:
        if not isinstance(self.options.rotary, str):
            return None
        assert spatial_shape is not None
        return plane_rotation(
            spatial_shape,
            width=self.head_dim if self.options.rotary == "blocks" else None,
            num_prefix_tokens=self.num_prefix_tokens,
            key_shape=key_shape,
            stride=self.options.spatial_reduction,
        )

    def _finish(self, out: Tensor, x: Tensor) -> Tensor:
        out = out.transpose(1, 2).flatten(2)
        if self.norm is not None:
            out = self.norm(out)
        if self.gate is not None:
            out = self.gate(out, x)
        return self.proj(out)

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"dim={self.dim}, {heads}, causal={self.causal}, rotary={self.options.rotary!r}"
