"""What the calls of all ops share: the choice of a form, dtypes, hidden tokens, the start of a state, and checks.

Errors of checks say what was given and what is allowed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn.kernels.common.support import SWITCH, assume_constant, switched_off
from linattn.ops.shared.types import LinearState

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Forms in plain PyTorch take every call, every dtype and every device; kernels only what they were written for.
FORMS = ("reference", "recurrent", "chunked")
IMPLEMENTATIONS = (*FORMS, "triton")


class Choice(NamedTuple):
    """The implementation that serves a call, and the reason; ``print`` shows both."""

    impl: str
    reason: str

    def __str__(self) -> str:
        return f"{self.impl}: {self.reason}"


def choose(
    impl: str, like: Tensor, against_triton: Callable[[], str], *, one_token: bool = False, own_gradients: bool = False
) -> Choice:
    """Choose the implementation of a call: the one that is named, or the fastest proved one for ``"auto"``.

    ``auto`` takes kernels on a GPU wherever they serve the call, unless ``LINATTN_TRITON=0`` is set; elsewhere the
    chunked form, or the recurrent form for a single token. On a CPU kernels run only if they are named, in Triton's
    interpreter, for tests. Under forward mode or a transform of ``torch.func`` that differentiates, ``auto`` takes no
    kernel, and the reference form where the chunked form would not be differentiated correctly. A named implementation
    that cannot serve the call is refused.

    Args:
        like: an input of the call, for its device.
        against_triton: returns why kernels cannot serve the call; empty if they can.
        one_token: whether the call is a step of decoding.
        own_gradients: whether the chunked form has a gradient formula of its own, as kernels do: for ``backward()``.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    beyond_backward = differentiated_beyond_backward()
    if beyond_backward and (impl == "triton" or (own_gradients and impl == "chunked")):
        raise ValueError(
            f"impl={impl!r} can only be differentiated by backward(), not by forward mode or transforms of torch.func; "
            "use impl='auto', 'reference' or 'recurrent'"
        )
    if impl == "triton" and (reason := against_triton()):
        raise ValueError(f"impl='triton' cannot serve this call: {reason}; use impl='auto'")
    if impl != "auto":
        return Choice(impl, "named by the caller")
    plain = Choice("chunked", f"linear time and memory, the fastest form on {like.device.type} of plain PyTorch")
    if one_token:
        plain = Choice("recurrent", "one token gains nothing from any other form of plain PyTorch")
    elif beyond_backward and own_gradients:
        plain = Choice(
            "reference", "quadratic, but forward mode and torch.func can differentiate each of its operations"
        )
    if like.device.type != "cuda" or beyond_backward:
        return plain
    if reason := f"{SWITCH}=0 turns kernels off" if switched_off() else against_triton():
        return Choice(plain.impl, f"{plain.reason}; no kernel: {reason}")
    return Choice("triton", "a fused GPU kernel serves the call")


def chooser(kernels: Any, *, like: str = "q", own_gradients: bool = False) -> Callable[[Any, str], Choice]:
    """The check of a call of an op, and the choice of its form; ``like`` is the name of an input, see ``choose``."""

    def checked_choice(call: Any, impl: str) -> Choice:
        call.check()
        against, one = partial(kernels.against, call), call.is_step
        return choose(impl, getattr(call, like), against, one_token=one, own_gradients=own_gradients)

    return checked_choice


@assume_constant
def differentiated_beyond_backward() -> bool:
    """Whether forward mode or a transform such as ``torch.func.grad`` or ``jvp`` is differentiating at the moment.

    ``vmap`` does not count. Operators with a gradient formula of their own serve only ``backward()``: under these
    transforms they would give a derivative of 0 without any error, or an error about their internals.

    ``torch.compile`` takes the answer as a constant, and compiles anew when the ``torch.func`` transforms around a
    function change. It does not watch for ``dual_level``: inside one, a function that was compiled before may lose its
    tangents, even if it consists of PyTorch's own operations.
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    transforms = torch._C._functorch.TransformType
    active = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (transforms.Grad, transforms.Jvp) for level in active)


def refuse_second_derivatives(backward: Any, whose: str) -> None:
    """Make a second derivative of ``backward``, an operator, an error; ``whose`` is what the message calls it."""

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"gradients of {whose} cannot be differentiated again (create_graph=True); "
            "impl='reference' and impl='recurrent' have second derivatives"
        )

    backward.register_autograd(refuse)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of states, gates and sums: fp32, or fp64 if any of the tensors is fp64."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def output_dtype(like: Tensor) -> torch.dtype:
    """The dtype of an output: that of ``like``, v or x, or that of autocast, which leaves fp64 alone."""
    return like.dtype if like.dtype == torch.float64 else autocast_dtype(like) or like.dtype


def widen(gate: Tensor) -> Tensor:
    """Cast gates to fp64 if the device has it: they are small tensors, and their sums and differences need digits."""
    return gate.float() if gate.device.type == "mps" else gate.double()


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off, so that sums and states keep their precision; it would round them inside matmuls."""
    if autocast_dtype(like) is None:
        return nullcontext()
    return torch.autocast(like.device.type, enabled=False)


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the masked tokens of ``x (B, H, T, D)``, whatever they hold (padding may be NaN)."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def finite_unit(log_scale: Tensor) -> Tensor:
    """The unit of a sum of exponentials; 0 where nothing is in it (-inf): any finite unit gives it the weight 0."""
    return torch.where(log_scale == -torch.inf, 0.0, log_scale)


def one_token(
    kind: Callable[..., Any], tokens: tuple[Tensor, ...], state: Any, options: dict[str, Any], of_token: Sequence[str]
) -> Any:
    """The call ``kind`` of a step: ``tokens`` and the options ``of_token``, ``(B, H, ..)``, get an axis of tokens."""
    check_token(*tokens)
    options = {name: _with_axis(x) if name in of_token else x for name, x in options.items()}
    return kind(*_with_axis(tokens), initial_state=state, need_state=True, **options)


def _with_axis(x: Any) -> Any:
    """What is no tensor stays as it is: the call's own check names it."""
    if isinstance(x, tuple):
        return tuple(map(_with_axis, x))
    return x.unsqueeze(2) if isinstance(x, Tensor) and x.ndim > 1 else x


def num_sequences(k: Tensor, cu_seqlens: Tensor | None) -> int:
    return k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def zero_state(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> LinearState:
    dtype, n = compute_dtype(k, v), num_sequences(k, cu_seqlens)
    kv = torch.zeros(n, k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=k.device)
    return LinearState(kv, torch.zeros(n, k.shape[1], k.shape[3], dtype=dtype, device=k.device))


def check_tensor(name: str, value: object, shape: str, ndim: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(value).__name__}")
    if value.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, got {value.dtype}")
    if value.ndim != ndim:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(value.shape)}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_size(name: str, axis: str, got: int, expected: int, source: str) -> None:
    if got != expected:
        raise ValueError(f"{name} has {axis} {got}, but {source} has {expected}; they must be equal")


def check_shape(name: str, value: Tensor, *allowed: tuple[int, ...]) -> None:
    # Compare size by size: a traced length is a symbol, and `in` on tuples of symbols finds nothing in torch 2.11.
    if not any(value.ndim == len(shape) and all(map(eq, value.shape, shape)) for shape in allowed):
        choices = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"{name} must have shape {choices}, got {tuple(value.shape)}")


def check_device(name: str, value: Tensor, like: Tensor, reference: str = "q") -> None:
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, but {reference} is on {like.device}")


def check_same(reference: str, like: Tensor, **others: Tensor | None) -> None:
    """Check for the same device, and the same dtype unless autocast is on, which mixes dtypes by design."""
    mixed_dtypes = autocast_dtype(like) is not None
    for name, other in others.items():
        if other is None:
            continue
        check_device(name, other, like, reference)
        if other.dtype != like.dtype and not mixed_dtypes:
            raise TypeError(f"{name} is {other.dtype}, but {reference} is {like.dtype}; give them one dtype")


def check_input(name: str, value: object, words: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Check a tensor of a known shape, in words for what is not a tensor, on the device of q."""
    check_tensor(name, value, words, len(shape))
    assert isinstance(value, Tensor)
    check_shape(name, value, shape)
    check_device(name, value, like)


def check_qkv(q: object, k: object, v: object, *, one_length: bool = True, one_width: bool = True) -> None:
    """Check q ``(B, H, T, K)``, k ``(B, H_kv, T, K)`` and v ``(B, H_kv, T, V)``.

    Without ``one_length`` queries may be fewer or more than keys, without ``one_width`` their widths may differ.
    """
    Tq, Tk = ("T", "T") if one_length else ("Tq", "Tk")
    for name, x, shape in (
        ("q", q, f"(B, H, {Tq}, K)"),
        ("k", k, f"(B, H_kv, {Tk}, K)"),
        ("v", v, f"(B, H_kv, {Tk}, V)"),
    ):
        check_tensor(name, x, shape, 4)
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    check_same("q", q, k=k, v=v)
    check_groups(q.shape[1], k.shape[1])
    check_size("k", "batch size", k.shape[0], q.shape[0], "q")
    check_size("v", "batch size", v.shape[0], q.shape[0], "q")
    check_size("v", "number of heads", v.shape[1], k.shape[1], "k")
    if one_length:
        check_size("k", "length", k.shape[2], q.shape[2], "q")
    check_size("v", "length", v.shape[2], k.shape[2], "k")
    if one_width:
        check_size("k", "head dimension", k.shape[3], q.shape[3], "q")


def check_token(q_t: object, k_t: object, v_t: object) -> None:
    """Check the tensors of one token of decoding."""
    for name, x, shape in (("q_t", q_t, "(B, H, K)"), ("k_t", k_t, "(B, H_kv, K)"), ("v_t", v_t, "(B, H_kv, V)")):
        check_tensor(name, x, shape, 3)


def check_state(state: object, kind: type, shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> None:
    """Check that an initial state is None or of a kind, and the shapes of its tensors, by name."""
    if state is None:
        return
    if not isinstance(state, kind):
        fields = ", ".join(kind.__annotations__)
        raise TypeError(f"initial_state must be {kind.__name__}({fields}) or None, got {type(state).__name__}")
    for name, shape in shapes.items():
        check_input(f"initial_state.{name}", attrgetter(name)(state), str(shape), shape, like)


def check_scale(scale: float | None) -> None:
    if scale is not None:
        check_number("scale", scale, above=0)


def check_groups(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"the heads of q ({num_heads}) must be a multiple of the heads of k and v ({num_kv_heads})")


def check_key_mask(mask: object, batch: int, length: int, like: Tensor, reference: str = "q") -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_mask must be a bool tensor ({batch}, {length}), got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool (True = real token), got {mask.dtype}; use key_mask.bool()")
    check_shape("key_mask", mask, (batch, length))
    check_device("key_mask", mask, like, reference)


def check_cu_seqlens(
    offsets: object, batch: int, length: int, like: Tensor, values: bool, reference: str = "q"
) -> None:
    if offsets is None:
        return
    if not isinstance(offsets, Tensor):
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor (N+1,), got {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {offsets.dtype}")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape (N+1,) with N >= 1, got {tuple(offsets.shape)}")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row: the batch size must be 1, got {batch}")
    check_device("cu_seqlens", offsets, like, reference)
    if values:
        if bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(f"cu_seqlens must not decrease, got {offsets.tolist()}")
        if int(offsets[0]) != 0 or int(offsets[-1]) != length:
            raise ValueError(f"cu_seqlens must start at 0 and end at T = {length}, got {offsets.tolist()}")


def check_layout(
    mask: object, offsets: object, batch: int, length: int, like: Tensor, validate: bool | None, reference: str = "q"
) -> bool:
    """Check ``key_mask`` and ``cu_seqlens``; returns whether other values are to be checked too."""
    values = check_values(like, validate)
    check_key_mask(mask, batch, length, like, reference)
    check_cu_seqlens(offsets, batch, length, like, values, reference)
    return values


def check_log_decay(decay: object, allowed: Sequence[tuple[int, ...]], like: Tensor, values: bool) -> None:
    if not isinstance(decay, Tensor):
        raise TypeError(f"log_decay must be a tensor or None, got {type(decay).__name__}")
    if decay.dtype not in FLOATING:
        raise TypeError(f"log_decay must be floating, got {decay.dtype}")
    check_shape("log_decay", decay, *allowed)
    check_device("log_decay", decay, like)
    if values and not bool((decay <= 0).all()):
        raise ValueError(f"log_decay must be <= 0 (a decay of at most 1), got a maximum of {decay.max().item():g}")


def check_log_input(log_input: Tensor, key_mask: Tensor | None, values: bool) -> None:
    """Check that the logarithms ``(B, H_kv, T)`` of weights of keys are numbers below infinity at real tokens."""
    if not values:
        return
    bad = ~(log_input < float("inf"))
    if bool((bad if key_mask is None else bad & key_mask[:, None]).any()):
        raise ValueError("log_input must be below +inf and not NaN at every real token")


def check_values(like: Tensor, validate: bool | None) -> bool:
    """Whether to check values: as ``validate`` says; None: only on the CPU, since elsewhere it costs a sync."""
    if torch.compiler.is_compiling() or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return like.device.type == "cpu" if validate is None else validate


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """The dtype autocast asks for on this tensor's device, or None where it is off."""
    device = like.device.type
    if device not in ("cpu", "cuda", "xpu", "mps") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def check_integer(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_number(
    name: str, value: object, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> None:
    """Check for a finite number: above ``above``, at least ``least`` and at most ``most``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and above < value < math.inf and least <= value <= most):  # type: ignore[operator]
        bounds = ((">", above, -math.inf), (">=", least, -math.inf), ("<=", most, math.inf))
        allowed = " and ".join(f"{sign} {bound:g}" for sign, bound, none in bounds if bound != none)
        raise ValueError(f"{name} must be a finite number {allowed}".rstrip() + f", got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
