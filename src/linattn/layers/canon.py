"""Canon layers: each token mixes with its last few neighbours, at up to four places of a block."""

import torch
from torch import Tensor, nn

from linattn.ops.convolution.api import (
    ConvolutionOutput,
    short_convolution,
    short_convolution_step,
    short_convolution_with_state,
)
from linattn.ops.convolution.call import ACTIVATIONS, Activation, ConvolutionState
from linattn.ops.shared.call import check_choice, check_flag, check_integer

POSITIONS = ("A", "B", "b", "C", "D")
MEANING = "A before attention, B on q, k and v, b a SiLU convolution in its place, C before the MLP, D inside it"


def check_canon(canon: str | None) -> None:
    """Check the positions of Canon layers, such as ``"AbCD"``; None and the empty string stand for none.

    Example:
        >>> from linattn.layers.canon import check_canon
        >>> check_canon("BbC")
        Traceback (most recent call last):
            ...
        ValueError: canon must have B or b, not both, they stand at the same place, got 'BbC'
    """
    if canon is None:
        return
    if not isinstance(canon, str):
        raise TypeError(f"canon must be a string such as 'ABCD', or None, got {type(canon).__name__}")
    for letter in canon:
        if letter not in POSITIONS:
            raise ValueError(f"canon must be made of the letters {MEANING}; got {letter!r} in {canon!r}")
        if canon.count(letter) > 1:
            raise ValueError(f"canon must name each position once, got {letter!r} twice or more in {canon!r}")
    if {"B", "b"} <= set(canon):
        raise ValueError(f"canon must have B or b, not both, they stand at the same place, got {canon!r}")


class Canon(nn.Module):
    """Canon layer: a causal depthwise convolution over the last few tokens, with a residual connection.

    ``h'_t = h_t + sum_{w=0}^{W-1} weight[:, W-1-w] h_{t-w}``, without bias, and by default without activation

    h ``(B, T, C)`` to ``(B, T, C)``; before the first token h is 0. All weights are drawn from
    ``U(-W^-1/2, W^-1/2)``, as in PyTorch's depthwise convolution: large enough to matter from the first step. The
    weight belongs to this module and not to a ``Conv1d``, so that models that shrink all linear maps at initialisation
    do not change it.

    Paper: Allen-Zhu, Physics of Language Models: Part 4.1, arXiv:2512.17351. State: the last ``W - 1`` tokens.

    Args:
        width: C.
        kernel_size: W.
        residual: whether to add h. False with ``activation="silu"`` is the short convolution that GLA and Mamba have
            by themselves, position b. It is initialised as in Mamba. GLA's code initialises it at 0.02, which only
            works with a norm after the attention.
        activation: ``"silu"`` or None, applied before h is added.

    Example:
        >>> import torch
        >>> from linattn.layers.canon import Canon
        >>> canon, h = Canon(8), torch.randn(1, 5, 8)
        >>> start, state = canon.with_state(h[:, :3])
        >>> end, state = canon.with_state(h[:, 3:], state=state)
        >>> torch.allclose(torch.cat([start, end], dim=1), canon(h))
        True

    The last tap is the token's own, as in ``nn.Conv1d``:

        >>> last_tap = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).expand(8, 4)
        >>> _ = canon.load_state_dict({"weight": last_tap})
        >>> torch.equal(canon(h), h + h)
        True
    """

    def __init__(
        self, width: int, *, kernel_size: int = 4, residual: bool = True, activation: Activation = None
    ) -> None:
        super().__init__()
        check_integer("width", width)
        check_integer("kernel_size", kernel_size)
        check_flag("residual", residual)
        check_choice("activation", activation, ACTIVATIONS)
        self.residual, self.activation = residual, activation
        self.weight = nn.Parameter(torch.empty(width, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, h: Tensor, *, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Apply to all tokens at once; windows reach over masked tokens and stop at the borders of packed sequences."""
        return short_convolution(
            h, self.weight, residual=self.residual, activation=self.activation, key_mask=key_mask, cu_seqlens=cu_seqlens
        )

    def with_state(
        self,
        h: Tensor,
        *,
        state: ConvolutionState | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> ConvolutionOutput:
        """Start from a state (None: empty) and return the output and the next state."""
        if h.shape[1] == 1 and key_mask is None and cu_seqlens is None:
            out = self.step(h.squeeze(1), state)
            return ConvolutionOutput(out.output.unsqueeze(1), out.state)
        return short_convolution_with_state(
            h, self.weight, initial_state=state, residual=self.residual, activation=self.activation,
            key_mask=key_mask, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def step(self, h_t: Tensor, state: ConvolutionState | None) -> ConvolutionOutput:
        """Apply to one token ``h_t (B, C)``, and return the output and the next state."""
        return short_convolution_step(h_t, self.weight, None, state, residual=self.residual, activation=self.activation)

    def extra_repr(self) -> str:
        width, kernel_size = self.weight.shape
        return f"{width}, kernel_size={kernel_size}, residual={self.residual}, activation={self.activation!r}"


def canon_at(position: str, canon: str | None, width: int, kernel_size: int) -> Canon | None:
    """The Canon layer that ``canon`` has at ``position`` (A, B, C or D), or None; b stands at position B."""
    if position in (canon or ""):
        return Canon(width, kernel_size=kernel_size)
    if position == "B" and "b" in (canon or ""):
        return Canon(width, kernel_size=kernel_size, residual=False, activation="silu")
    return None
