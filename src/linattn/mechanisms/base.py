"""The base classes of mechanisms: modules that map (q, k, v) to the output of attention."""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

from torch import Tensor, nn

from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import IMPLEMENTATIONS, hide
from linattn.ops.shared.rotation import Rotate
from linattn.ops.shared.types import LinearState

if TYPE_CHECKING:
    from linattn.mechanisms.registry import MechanismInfo


class MechanismOutput(NamedTuple):
    """Output of a mechanism, ``(B, H, T, D)``, or ``(B, H, D)`` for one step, and its state after the last token."""

    output: Tensor
    state: Any


@dataclass(frozen=True)
class Call:
    """What a mechanism is given besides q, k and v: masks, input, state and options of one call."""

    impl: str
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    spatial_shape: tuple[int, int] | None = None
    x: Tensor | None = None
    state: Any = None
    need_state: bool = False
    rotate: Rotate | None = None


class CommonOptions(TypedDict, total=False):
    """The options that every mechanism has. A mechanism with options of its own passes these on to its base class."""

    num_kv_heads: int | None
    causal: bool
    impl: str
    input_dim: int | None


class Mechanism(nn.Module, ABC):
    """Base class of all mechanisms: attention as an exchangeable module, ``(B, H, T, D) -> (B, H, T, D)``.

    Args:
        num_heads: H, number of query heads.
        head_dim: D, width of q, k and v per head.
        num_kv_heads: number of key and value heads (None: as many as query heads); must divide ``num_heads``.
        causal: whether a token sees only itself and the past; needed for states and steps.
        impl: form of the algebra, as in ``linear_attention``.
        input_dim: width of the layer's input x (None: ``num_heads * head_dim``); needed by mechanisms whose registry
            entry has ``uses_input``.
    """

    info: ClassVar["MechanismInfo"]
    impls: ClassVar[tuple[str, ...]] = ("auto", *IMPLEMENTATIONS)
    state_type: ClassVar[type] = LinearState  # a NamedTuple of tensors
    # What call.rotate turns: the inputs q and k, the features that attend makes of them, or None: neither makes sense.
    rotates: ClassVar[Literal["inputs", "features"] | None] = "inputs"

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
            checks.check_integer(name, 1 if value is None and name in CommonOptions.__annotations__ else value)
        self.num_heads, self.head_dim, self.causal, self.impl = num_heads, head_dim, causal, impl
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.input_dim = num_heads * head_dim if input_dim is None else input_dim
        checks.check_groups(num_heads, self.num_kv_heads)
        checks.check_flag("causal", causal)
        checks.check_choice("impl", impl, self.impls)
        if hasattr(self, "info"):
            check_direction(self.info, causal)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        """Compute the attention; ``forward``, ``with_state`` and ``step`` all call this method.

        When it is called, heads, widths and masks have been checked, and padded keys, values and inputs are 0. The
        returned state may be None unless ``call.need_state``.
        """

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
        rotate: Rotate | None = None,
    ) -> Tensor:
        """Attend: q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``.

        ``rotate`` turns queries and keys. Mechanisms that map them to features turn the features instead, and only
        those of the numerator.
        """
        if rotate is not None and not self.rotates:
            raise ValueError(f"mechanism {self._declared('name')!r} has no features that rotate could turn")
        call = Call(self.impl, key_mask, cu_seqlens, spatial_shape, x, rotate=rotate)
        return self._checked_attend(q, k, v, call).output

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
        """Attend from a state (None: empty) and also return the next state, for a prompt as a whole or in pieces."""
        self._check_has_state()
        call = Call(self.impl, key_mask, cu_seqlens, x=x, state=state, need_state=True)
        return self._checked_attend(q, k, v, call)

    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, *, x: Tensor | None = None) -> MechanismOutput:
        """Decode one token: q_t ``(B, H, D)``, k_t and v_t ``(B, H_kv, D)``, x ``(B, input_dim)``."""
        self._check_has_state()
        for name, tensor in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)):
            checks.check_tensor(name, tensor, "(B, H, D), one token,", 3)
        q, k, v = q_t.unsqueeze(2), k_t.unsqueeze(2), v_t.unsqueeze(2)
        x = None if x is None else x.unsqueeze(1)
        call = Call("auto", x=x, state=state, need_state=True)  # the recurrent form, or its kernel
        out = self._checked_attend(q, k, v, call)
        return MechanismOutput(out.output.squeeze(2), out.state)

    @abstractmethod
    def state_size(self, length: int) -> int:
        """How many numbers the state of one sequence holds after ``length`` tokens."""

    @abstractmethod
    def flops(self, length: int) -> int:
        """How many multiplications and additions the matrix products of a forward pass over one sequence take.

        Learned maps of the mechanism count; the layer's projections and elementwise work do not.
        """

    def truncated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        """The vectors, shaped like q and k, whose negative parts a ReLU of the mechanism drops; None: it drops nothing.

        q ``(B, H, Tq, D)`` and k ``(B, H_kv, Tk, D)`` are without padding, and already turned where ``rotates`` is
        ``"inputs"``. A mechanism that keeps negative parts in features of their own drops nothing.
        """
        return None

    @property
    def turned_width(self) -> int:
        """How many channels per head ``rotate`` is given."""
        return self.head_dim

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def input_of(self, x: Tensor | None, like: Tensor) -> Tensor:
        """The layer's input x, checked against ``like (B, H, T, D)``; for mechanisms that need it."""
        shape = (like.shape[0], like.shape[2], self.input_dim)
        if x is None:
            raise ValueError(f"mechanism {self._declared('name')!r} takes its gates from x {shape}, but x is None")
        if x.ndim != 3 or any(got != wanted for got, wanted in zip(x.shape, shape, strict=True)):
            raise ValueError(f"x must have shape {shape} (B, T, input_dim), got {tuple(x.shape)}")
        checks.check_same("q", like, x=x)
        return x

    def _checked_attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        """Check inputs against this mechanism (the ops check them against each other), wipe padding, and attend.

        Padding may hold anything, NaN too, and a gradient of 0 through a NaN would be NaN in every learned map.
        """
        for name, tensor, heads in (("q", q, "num_heads"), ("k", k, "num_kv_heads"), ("v", v, "num_kv_heads")):
            checks.check_tensor(name, tensor, "(B, H, T, D)", 4)
            source = f"the mechanism's {heads}"
            checks.check_size(name, "number of heads", tensor.shape[1], getattr(self, heads), source)
            checks.check_size(name, "head dimension", tensor.shape[3], self.head_dim, "the mechanism's head_dim")
        weight = next(self.parameters(), None)
        if weight is not None:
            checks.check_same("the mechanism's parameters", weight, q=q)
        checks.check_same("q", q, k=k, v=v)
        checks.check_size("k", "batch size", k.shape[0], q.shape[0], "q")
        checks.check_size("v", "batch size", v.shape[0], q.shape[0], "q")
        if call.state is not None and not isinstance(call.state, self.state_type):
            raise TypeError(f"state must be a {self.state_type.__name__}, got {type(call.state).__name__}")
        B, _, T, _ = k.shape
        if call.cu_seqlens is not None:
            checks.check_cu_seqlens(call.cu_seqlens, B, T, k, checks.check_values(k, None))
        if call.key_mask is not None:
            checks.check_key_mask(call.key_mask, B, T, k)
            k, v = hide(k, call.key_mask), hide(v, call.key_mask)
            if self._declared("uses_input"):
                x = self.input_of(call.x, k).masked_fill(~call.key_mask.unsqueeze(-1), 0)
                call = replace(call, x=x)
        if call.rotate is not None and self.rotates == "inputs":
            q, k = call.rotate(q, k)
        return self.attend(q, k, v, call)

    def _declared(self, what: str) -> Any:
        """A field of this mechanism's registry entry; for a class that is not registered, the usual value."""
        ordinary = {"name": type(self).__name__, "state": "constant", "uses_input": False}
        return getattr(getattr(self, "info", None), what, ordinary[what])

    def _check_has_state(self) -> None:
        if self._declared("state") == "none":
            raise ValueError(f"mechanism {self._declared('name')!r} has no recurrent form, so no state to hand over")
        if not self.causal:
            raise ValueError("a state needs causal=True: a bidirectional mechanism sees the whole sequence")

    def extra_repr(self) -> str:
        """The usual options, and those of its own that are plain values."""
        own = [n for n in inspect.signature(type(self).__init__).parameters if n not in CommonOptions.__annotations__]
        values = {name: getattr(self, name, self) for name in dict.fromkeys((*own, "num_kv_heads", "causal", "impl"))}
        plain = {name: value for name, value in values.items() if isinstance(value, int | float | str | None)}
        return ", ".join(f"{name}={value!r}" for name, value in plain.items())


def check_direction(info: "MechanismInfo", causal: bool) -> None:
    """Raise ValueError unless a mechanism is declared for attention that is ``causal``, or for bidirectional one."""
    if not (info.causal if causal else info.bidirectional):
        only = "bidirectional: use causal=False" if causal else "causal: use causal=True"
        raise ValueError(f"mechanism {info.name!r} is only {only}")


def check_length(length: int) -> None:
    checks.check_integer("length", length, 0)


class LinearBase(Mechanism):
    """Base of mechanisms that call ``linear_attention``. A direct subclass implements ``attend`` and its own state."""

    rotates: ClassVar[Literal["inputs", "features"] | None] = "features"

    @property
    def num_features(self) -> int:
        """Width of the mapped queries and keys: K of the algebra."""
        return self.head_dim

    @property
    def turned_width(self) -> int:
        return self.num_features if self.rotates == "features" else self.head_dim

    def linear(self, call: Call, arguments: dict[str, Any]) -> MechanismOutput:
        """Call the algebra once, with or without a state; ``arguments`` take precedence over what ``call`` says."""
        options: dict[str, Any] = {"causal": self.causal, "key_mask": call.key_mask, "cu_seqlens": call.cu_seqlens}
        options |= {"impl": call.impl}
        if not call.need_state:
            options |= {"rotate": call.rotate if self.rotates == "features" else None}
            return MechanismOutput(linear_attention(**(options | arguments)), None)
        options |= {"initial_state": call.state}
        return MechanismOutput(*linear_attention_with_state(**(options | arguments)))

    def state_size(self, length: int) -> int:
        check_length(length)
        if self._declared("state") == "none":
            return 0
        return self.num_kv_heads * self.num_features * (self.head_dim + 1)

    def flops(self, length: int) -> int:
        """The state is written once per kv head and read once per head, 2 K (V + 1) each with the denominator."""
        check_length(length)
        return length * (self.num_heads + self.num_kv_heads) * 2 * self.num_features * (self.head_dim + 1)


class LinearMechanism(LinearBase):
    """Base of mechanisms that are one call of ``linear_attention``: subclasses implement ``arguments``."""

    @abstractmethod
    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of ``linear_attention``: ``q``, ``k`` and ``v``, mapped or as they are, and options."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        return self.linear(call, self.arguments(q, k, v, x=call.x))
