"""The pre-norm block of a language model, around any mechanism, with optional Canon layers."""

from torch import Tensor, nn

from linattn.layers.canon import Canon, canon_at
from linattn.layers.norms import create_norm
from linattn.models.language.attention import SequenceAttention
from linattn.models.language.feed_forward import FeedForward
from linattn.models.language.options import BlockOptions
from linattn.models.language.tokens import BlockState, Tokens
from linattn.ops.convolution.call import ConvolutionState


class Block(nn.Module):
    """``x += attn(canon_a(norm1(x)))``, then ``x += mlp(canon_c(norm2(x)))``; Canon b is inside attn, d inside mlp.

    x ``(B, T, C)`` to ``(B, T, C)``.

    Example:
        >>> import torch
        >>> from linattn.models.language.block import Block
        >>> from linattn.models.language.options import BlockOptions
        >>> from linattn.models.language.tokens import Tokens
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
        places = (options.canon_positions, options.dim, options.canon_kernel)
        self.norm1 = create_norm(options.norm, options.dim)
        self.canon_a = canon_at("A", *places)
        self.attn = SequenceAttention(options)
        self.norm2 = create_norm(options.norm, options.dim)
        self.canon_c = canon_at("C", *places)
        self.mlp = FeedForward(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Process all tokens at once, without a state."""
        h = self.norm1(x)
        if self.canon_a is not None:
            h = self.canon_a(h, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)
        x = x + self.dropout(self.attn(h, tokens))
        h = self.norm2(x)
        if self.canon_c is not None:
            h = self.canon_c(h, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)
        return x + self.dropout(self.mlp(h, tokens))

    def with_state(self, x: Tensor, tokens: Tokens, state: BlockState | None) -> tuple[Tensor, BlockState]:
        """Go on from a state (None: empty) and return the next one: for prefill, whole or in pieces, and decoding."""
        past = BlockState(None) if state is None else state
        h, canon_a = _through(self.canon_a, self.norm1(x), tokens, past.canon_a)
        attended, new = self.attn.with_state(h, tokens, state)
        x = x + self.dropout(attended)
        h, canon_c = _through(self.canon_c, self.norm2(x), tokens, past.canon_c)
        fed, canon_d = self.mlp.with_state(h, tokens, past.canon_d)
        # Not new._replace: torch 2.11 cannot compile its result where that outlives the call, as it does in a cache.
        return x + self.dropout(fed), BlockState(new.mechanism, canon_a, new.canon_b, canon_c, canon_d)


def _through(
    canon: Canon | None, h: Tensor, tokens: Tokens, state: ConvolutionState | None
) -> tuple[Tensor, ConvolutionState | None]:
    if canon is None:
        return h, None
    return canon.with_state(h, state=state, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)
