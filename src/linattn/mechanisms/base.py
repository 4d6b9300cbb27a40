"""What every mechanism is: a module that maps (q, k, v) to the output of attention."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from linattn.ops.checks import check_choice, check_groups
from linattn.ops.choice import IMPLEMENTATIONS
from linattn.ops.linear import linear_attention, linear_attention_with_state
from linattn.ops.types import LinearState

if TYPE_CHECKING:
    from linattn.mechanisms.registry import MechanismInfo


class MechanismOutput(NamedTuple):
    """Output ``(B, H, T, D)``, or ``(B, H, D)`` of a step, and the mechanism's own state after it."""

    output: Tensor
    state: Any


class Mechanism(nn.Module, ABC):
    """Attention as an exchangeable part: ``(B, H, T, D) -> (B, H, T, D)``.

    Args:
        num_heads: H, heads of q.
        head_dim: D, width of q, k and v per head.
        num_kv_heads: heads of k and v (None: as many as q); divides ``num_heads``.
        causal: a token sees itself and the past only; needed for states and steps.
        impl: form of the algebra, as in ``linear_attention``.
        input_dim: width of the layer's input x (None: ``num_heads * head_dim``); used where the registry
            says ``uses_input``.
    """

    info: ClassVar["MechanismInfo"]

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        impl: str = "auto",
        input_dim: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", num_kv_heads),
                            ("input_dim", input_dim)):  # fmt: skip
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_groups(num_heads, self.num_kv_heads)
        self.causal = causal
        self.input_dim = num_heads * head_dim if input_dim is None else input_dim
        check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
        self.impl = impl
        info = getattr(type(self), "info", None)
        if info is not None and not (info.causal if causal else info.bidirectional):
            only = "bidirectional: use causal=False" if causal else "causal: use causal=True"
            raise ValueError(f"mechanism {info.name!r} is only {only}")

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spatial_shape: tuple[int, int] | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Attend: q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``."""

    def with_state(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: Any = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        x: Tensor | None = None,
    ) -> MechanismOutput:
        """Attend from a state (None: empty) and return the next one: prefill, also in pieces."""
        raise ValueError(f"mechanism {self.info.name!r} has no recurrent form, so no state to hand over")

    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, *, x: Tensor | None = None) -> MechanismOutput:
        """Decode one token: q_t ``(B, H, D)``, k_t and v_t ``(B, H_kv, D)``, x ``(B, input_dim)``."""
        for name, t in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)):
            if t.ndim != 3:
                raise ValueError(f"{name} must be (B, H, D), one token, got shape {tuple(t.shape)}")
        x = None if x is None else x.unsqueeze(1)
        out = self.with_state(q_t.unsqueeze(2), k_t.unsqueeze(2), v_t.unsqueeze(2), state=state, x=x)
        return MechanismOutput(out.output.squeeze(2), out.state)

    @abstractmethod
    def state_size(self, length: int) -> int:
        """Numbers in the state of one sequence after ``length`` tokens."""

    @abstractmethod
    def flops(self, length: int) -> int:
        """Multiplications and additions of a forward pass over one sequence, projections not counted."""

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def input_of(self, x: Tensor | None, batch: int, length: int) -> Tensor:
        """The layer's input, checked; for mechanisms that need it."""
        shape = (batch, length, self.input_dim)
        if x is None:
            raise ValueError(f"mechanism {self.info.name!r} takes its gates from x {shape}, but x is None")
        if tuple(x.shape) != shape:
            raise ValueError(f"x must have shape {shape} (B, T, input_dim), got {tuple(x.shape)}")
        return x

    def _need_causal(self) -> None:
        if not self.causal:
            raise ValueError("a state needs causal=True: a bidirectional mechanism sees the whole sequence")

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, causal={self.causal}, impl={self.impl!r}"


def check_length(length: int) -> None:
    if not isinstance(length, int) or length < 0:
        raise ValueError(f"length must be an integer >= 0, got {length!r}")


class LinearMechanism(Mechanism):
    """A mechanism that is one call of ``linear_attention``: subclasses say with which arguments."""

    @abstractmethod
    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of ``linear_attention``: ``q``, ``k``, ``v`` mapped or as they are, and options."""

    @property
    @abstractmethod
    def num_features(self) -> int:
        """K of the algebra: width of the mapped queries and keys."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spatial_shape: tuple[int, int] | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        return linear_attention(
            **self.arguments(q, k, v, x=x), causal=self.causal, key_mask=key_mask, cu_seqlens=cu_seqlens,
            impl=self.impl,
        )  # fmt: skip

    def with_state(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: LinearState | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        x: Tensor | None = None,
    ) -> MechanismOutput:
        self._need_causal()
        out = linear_attention_with_state(
            **self.arguments(q, k, v, x=x), causal=True, initial_state=state, key_mask=key_mask,
            cu_seqlens=cu_seqlens, impl=self.impl,
        )  # fmt: skip
        return MechanismOutput(out.output, out.state)

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * self.num_features * (self.head_dim + 1)

    def flops(self, length: int) -> int:
        """State written and read once per token: 4 K V per head, and 4 K for the denominator."""
        check_length(length)
        return length * (self.num_heads + self.num_kv_heads) * 2 * self.num_features * (self.head_dim + 1)
