"""What the calls of all ops share: the choice of an implementation, dtypes, hidden tokens, the start of a state."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn.kernels.common.support import SWITCH, assume_constant, switched_off
from linattn.ops.shared.checks import autocast_dtype, check_choice, check_token
from linattn.ops.shared.types import LinearState

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
