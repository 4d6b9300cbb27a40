"""The feed-forward part of a language model's block."""

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.canon import canon_at
from linattn.models.language.options import BlockOptions
from linattn.models.language.tokens import Tokens
from linattn.ops.convolution.call import ConvolutionState


class FeedForward(nn.Module):
    """SwiGLU: ``W_2 (silu(a) * b)``, ``[a, b] = canon_d(W_1 x)``; or GELU: ``W_2 gelu(canon_d(W_1 x))``.

    x ``(B, T, C)`` to ``(B, T, C)``.
    """

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.gated = options.mlp == "swiglu"
        width = options.mlp_dim * (2 if self.gated else 1)
        self.fc1 = nn.Linear(options.dim, width, bias=options.mlp_bias)
        self.canon = canon_at("D", options.canon_positions, width, options.canon_kernel)
        self.fc2 = nn.Linear(options.mlp_dim, options.dim, bias=options.mlp_bias)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        hidden = self.fc1(x)
        if self.canon is not None:
            hidden = self.canon(hidden, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)
        return self._finish(hidden)

    def with_state(
        self, x: Tensor, tokens: Tokens, state: ConvolutionState | None
    ) -> tuple[Tensor, ConvolutionState | None]:
        """Start from the state of Canon d (None: empty), and return the next one (None without Canon d)."""
        hidden, new = self.fc1(x), None
        if self.canon is not None:
            hidden, new = self.canon.with_state(
                hidden, state=state, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens
            )
        return self._finish(hidden), new

    def _finish(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.fc2(F.gelu(hidden))
        a, b = hidden.chunk(2, dim=-1)
        return self.fc2(F.silu(a) * b)
