"""The pre-norm block of a language model, around any mechanism, with optional Canon layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.attention import Attention, AttentionState
from linattn.layers.canon import Canon, canon_at
from linattn.layers.norms import create_norm
from linattn.layers.rotary import SequenceRotary
from linattn.models.language.options import BlockOptions
from linattn.ops.convolution.call import ConvolutionState


@dataclass(frozen=True)
class Tokens:
    """Padding, packing and positions of a batch.

    ``key_mask (B, T)``: True = real token (None: all are). ``cu_seqlens (N+1,)``: offsets of packed sequences.
    ``rotations``: the rotation for each number of channels that some block turns; all blocks share them.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rotations: Mapping[int, SequenceRotary] = field(default_factory=dict)


class BlockState(NamedTuple):
    """What a block remembers: the state of its mechanism, and the last inputs of each of its Canon layers."""

    mechanism: Any
    canon_a: ConvolutionState | None = None
    canon_b: ConvolutionState | None = None
    canon_c: ConvolutionState | None = None
    canon_d: ConvolutionState | None = None


class FeedForward(nn.Module):
    """SwiGLU: ``W_2 (silu(a) * b)``, ``[a, b] = canon_d(W_1 x)``; or GELU: ``W_2 gelu(canon_d(W_1 x))``.

    x ``(B, T, C)`` to ``(B, T, C)``.
    """

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.gated = options.mlp == "swiglu"
        width = options.mlp_dim * (2 if self.gated else 1)
        self.fc1 = nn.Linear(options.dim, width, bias=options.mlp_bias)
        self.canon = canon_at("D", options.canon, width, options.canon_kernel)
        self.fc2 = nn.Linear(options.mlp_dim, options.dim, bias=options.mlp_bias)

    def forward(
        self, x: Tensor, tokens: Tokens, state: ConvolutionState | None = None, *, keep: bool = False
    ) -> tuple[Tensor, ConvolutionState | None]:
        """The output and, with ``keep``, the next state of Canon d (None without it), starting from ``state``."""
        hidden, new = _mixed(self.canon, self.fc1(x), tokens, state, keep)
        if not self.gated:
            return self.fc2(F.gelu(hidden)), new
        a, b = hidden.chunk(2, dim=-1)
        return self.fc2(F.silu(a) * b), new


class Block(nn.Module):
    """``x += attn(canon_a(norm1(x)))``, then ``x += mlp(canon_c(norm2(x)))``; Canon b is inside attn, d inside mlp.

    x ``(B, T, C)`` to ``(B, T, C)``.

    Example:
        >>> import torch
        >>> from linattn.models.language.block import Block, Tokens
        >>> from linattn.models.language.options import BlockOptions
        >>> block = Block(BlockOptions(dim=16, num_heads=2, num_kv_heads=1, mlp_dim=32, canon="ABCD", rotary=0))
        >>> x = torch.randn(1, 5, 16)
        >>> start, state = block.with_state(x[:, :3], Tokens(), None)
        >>> end, state = block.with_state(x[:, 3:], Tokens(), state)
        >>> torch.allclose(torch.cat([start, end], dim=1), block(x, Tokens()), atol=1e-5)
        True
    """

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        options.check()
        places = (options.canon, options.dim, options.canon_kernel)
        self.norm1 = create_norm(options.norm, options.dim)
        self.canon_a = canon_at("A", *places)
        self.attn = Attention(**vars(options.attention))
        self.norm2 = create_norm(options.norm, options.dim)
        self.canon_c = canon_at("C", *places)
        self.mlp = FeedForward(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Process all tokens at once, without a state."""
        return self._run(x, tokens, BlockState(None), keep=False)[0]

    def with_state(self, x: Tensor, tokens: Tokens, state: BlockState | None) -> tuple[Tensor, BlockState]:
        """Go on from a state (None: empty) and return the next one: for prefill, whole or in pieces, and decoding."""
        return self._run(x, tokens, BlockState(None) if state is None else state, keep=True)

    def _run(self, x: Tensor, tokens: Tokens, past: BlockState, *, keep: bool) -> tuple[Tensor, BlockState]:
        attn, new, canon_b = self.attn, None, None
        given: dict[str, Any] = {"key_mask": tokens.key_mask, "cu_seqlens": tokens.cu_seqlens}
        given["rotation"] = tokens.rotations.get(attn.rotary_width)
        h, canon_a = _mixed(self.canon_a, self.norm1(x), tokens, past.canon_a, keep)
        if not keep:
            h = attn(h, **given)
        elif attn.canon is None:
            h, new = attn.with_state(h, state=past.mechanism, **given)
        else:
            start = None if past.canon_b is None else AttentionState(past.mechanism, past.canon_b)
            h, (new, canon_b) = attn.with_state(h, state=start, **given)
        x = x + self.dropout(h)
        h, canon_c = _mixed(self.canon_c, self.norm2(x), tokens, past.canon_c, keep)
        h, canon_d = self.mlp(h, tokens, past.canon_d, keep=keep)
        # Made anew: torch 2.11 cannot compile the result of _replace where it outlives the call, as it does in a cache.
        return x + self.dropout(h), BlockState(new, canon_a, canon_b, canon_c, canon_d)


def _mixed(
    canon: Canon | None, h: Tensor, tokens: Tokens, state: ConvolutionState | None, keep: bool
) -> tuple[Tensor, ConvolutionState | None]:
    """h after a Canon layer, if there is one, and with ``keep`` the layer's next state."""
    if canon is None:
        return h, None
    if not keep:
        return canon(h, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens), None
    return canon.with_state(h, state=state, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)
