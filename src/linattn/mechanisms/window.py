"""Window attention: softmax over the last few tokens."""

from typing import Any, ClassVar, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, MechanismOutput, check_length
from linattn.mechanisms.common.exact import Exact
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared import call as checks
from linattn.ops.shared.packing import sequence_of_tokens


class WindowState(NamedTuple):
    """State of window attention: the last W - 1 real tokens of each sequence.

    ``keys`` and ``values`` are ``(N, H_kv, W-1, D)`` with the latest token at the end. ``filled (N,)`` says how many
    slots hold a token; the others, at the beginning, are 0.
    """

    keys: Tensor
    values: Tensor
    filled: Tensor


@register_mechanism("window", paper="arXiv:2004.05150", year=2020, bidirectional=False)
class Window(Exact):
    """Softmax attention over the last W tokens: exact nearby, blind beyond.

    ``o_t = sum_s softmax_s(scale q_t . k_s) v_s`` over ``t - W < s <= t``

    It is linear in the number of tokens and has a state of fixed size. Hybrid models use it for their local layers,
    next to linear attention, which remembers the rest. Blocks of W queries see their own keys and those of the block
    before, through ``scaled_dot_product_attention``. Padding takes up no place in a window. q ``(B, H, T, D)``, k and v
    ``(B, H_kv, T, D)``, output ``(B, H, T, D)``.

    Paper: Beltagy et al., Longformer. State per kv head: ``2 (W - 1) D`` numbers, the last keys and values.

    Args:
        window: W, including the query's own token.
        scale: factor on the scores; None: ``D^-0.5``.
        impl: ``"auto"`` as above; ``"reference"``: the formula, with all pairs of tokens.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("window", num_heads=2, head_dim=8, causal=True, window=4)
        >>> q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
        >>> alone = mechanism(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:])
        >>> torch.allclose(mechanism(q, k, v)[:, :, -1], alone[:, :, -1], atol=1e-6)
        True
    """

    state_type: ClassVar[type] = WindowState

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int = 128,
        scale: float | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, scale=scale, **common)
        checks.check_integer("window", window)
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        checks.check_size("k", "length", k.shape[2], q.shape[2], "q")
        checks.check_size("v", "length", v.shape[2], k.shape[2], "k")
        if call.need_state and call.cu_seqlens is not None:
            return self.one_per_row(q, k, v, call)
        order, own = None, None if call.cu_seqlens is None else sequence_of_tokens(call.cu_seqlens, k.shape[2])[None]
        if call.key_mask is not None:  # put real tokens first, so that the tokens of a window lie side by side
            order = (~call.key_mask).to(torch.uint8).argsort(dim=1, stable=True)
            q, k, v = (_taken(x, order) for x in (q, k, v))
            own = None if own is None else own.expand(order.shape).gather(1, order)
        if not call.need_state:
            output, state = self._softmax(q, k, v, None, own, call.impl), None
        else:
            output, state = self._from_state(q, k, v, call)
        return MechanismOutput(output if order is None else _taken(output, order.argsort(dim=1)), state)

    def _from_state(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, WindowState]:
        """Attend with the tokens of the state before the others; as queries they get outputs that are dropped."""
        old, T = self._start(k, call.state), k.shape[2]
        keys, values = torch.cat([old.keys.to(k), k], dim=2), torch.cat([old.values.to(v), v], dim=2)
        before = self.window - 1
        there = torch.arange(before + T, device=k.device) >= before - old.filled[:, None]
        if T == 1:  # all keys are in the query's window
            output = self.softmax(q, keys, values, there[:, None, None], explicit=call.impl == "reference")
        else:
            output = self._softmax(F.pad(q, (0, 0, before, 0)), keys, values, there, None, call.impl)[:, :, before:]
        real = torch.full_like(old.filled, T) if call.key_mask is None else call.key_mask.sum(1)
        last = real[:, None] + torch.arange(before, device=k.device)  # the places of the last tokens among all
        filled = (old.filled + real).clamp(max=before)
        return output, WindowState(_taken(keys, last), _taken(values, last), filled)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, filled: Tensor | None, own: Tensor | None, impl: str) -> Tensor:
        """Attend in blocks. ``filled (B, T)``: which keys exist; ``own (1 or B, T)``: each token's packed sequence."""
        T = k.shape[2]
        size = T if impl == "reference" else min(self.window, T)
        if not T:
            return q.new_zeros(*q.shape[:3], v.shape[3])
        blocks = -(-T // size)
        more = blocks * size - T
        filled = torch.ones(1, T, dtype=torch.bool, device=k.device) if filled is None else filled
        own = torch.zeros(1, T, dtype=torch.long, device=k.device) if own is None else own
        q = F.pad(q, (0, 0, 0, more)).unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
        k, v = (_with_block_before(F.pad(x, (0, 0, 0, more)), size, dim=2) for x in (k, v))
        keys_own = _with_block_before(F.pad(own, (0, more)), size, dim=1)
        keys_filled = _with_block_before(F.pad(filled, (0, more)), size, dim=1)
        queries = torch.arange(size, device=q.device)[:, None]
        distance = queries - torch.arange(-size, size, device=q.device)
        near = (distance >= 0) & (distance < self.window)
        queries_own = F.pad(own, (0, more)).unflatten(1, (blocks, size))
        visible = near & (queries_own.unsqueeze(-1) == keys_own.unsqueeze(-2)) & keys_filled.unsqueeze(-2)
        # A slot that holds no token may see no key, and the softmax of nothing is NaN: so every query sees itself.
        visible = (visible | (distance == 0)).expand(q.shape[0] // blocks, -1, -1, -1).flatten(0, 1).unsqueeze(1)
        output = self.softmax(q, k, v, visible, explicit=impl == "reference")
        output = output.unflatten(0, (-1, blocks)).transpose(1, 2)
        return output.flatten(2, 3)[:, :, :T]

    def _start(self, k: Tensor, state: Any) -> WindowState:
        """The state to start from, checked, or an empty one."""
        shape = (k.shape[0], self.num_kv_heads, self.window - 1, self.head_dim)
        if state is None:
            return WindowState(k.new_zeros(shape), k.new_zeros(shape), k.new_zeros(k.shape[0], dtype=torch.long))
        for name, part, wanted in zip(WindowState._fields, state, (shape, shape, shape[:1]), strict=True):
            checks.check_shape(f"state.{name}", part, wanted)
            checks.check_device(f"state.{name}", part, k)
        return WindowState(*state)

    def state_size(self, length: int) -> int:
        check_length(length)
        return 2 * self.num_kv_heads * (self.window - 1) * self.head_dim + 1

    def flops(self, length: int) -> int:
        """4 D for each of W keys, for the scores and the weighted sum, as if the first tokens saw W keys too."""
        check_length(length)
        return 4 * self.num_heads * self.head_dim * length * self.window


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Tokens ``order (B, n)`` of ``x (B, H, T, D)``."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _with_block_before(x: Tensor, size: int, dim: int) -> Tensor:
    """Each block of ``size`` tokens along ``dim`` with the block before it in front, or 0 in front of the first.

    ``(B, T)`` to ``(B, blocks, 2 size)``, ``(B, H, T, D)`` to ``(B blocks, H, 2 size, D)``; T is a multiple of size.
    """
    own = x.unflatten(dim, (-1, size))
    earlier = torch.cat([torch.zeros_like(own.narrow(dim, 0, 1)), own.narrow(dim, 0, own.shape[dim] - 1)], dim=dim)
    both = torch.cat([earlier, own], dim=dim + 1)
    return both if dim == 1 else both.transpose(1, 2).flatten(0, 1)
