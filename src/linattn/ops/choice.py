"""Which implementation serves a call, and why."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn.ops.checks import check_choice
from linattn.ops.triton.support import SWITCH, switched_off

# These take every call, every dtype and every device; kernels take what they were written for.
FORMS = ("reference", "recurrent", "chunked")
IMPLEMENTATIONS = (*FORMS, "triton")


class Choice(NamedTuple):
    """An implementation and the reason it was taken; ``print`` shows both."""

    impl: str
    reason: str

    def __str__(self) -> str:
        return f"{self.impl}: {self.reason}"


def choose(
    impl: str, like: Tensor, against_triton: Callable[[], str], *, one_token: bool = False, own_gradients: bool = False
) -> Choice:
    """A named implementation is taken as it is, or refused; ``auto`` takes the fastest that is proved.

    That is kernels on a GPU wherever they serve the call, unless ``LINATTN_TRITON=0`` is set; elsewhere the chunked
    form, or the recurrent one for a single token. On a CPU kernels run in Triton's interpreter, for tests, by name.

    Args:
        impl: what the caller named, or ``"auto"``.
        like: an input of the call; its device counts.
        against_triton: says why kernels cannot serve it; empty if they can.
        one_token: whether the call is a step of decoding.
        own_gradients: whether the chunked form has a formula of its own for gradients, as kernels have.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    transformed = differentiated_otherwise()
    if transformed and (impl == "triton" or (own_gradients and impl == "chunked")):
        raise ValueError(
            f"impl={impl!r} has gradients of plain backward() alone, none for forward mode or transforms of "
            "torch.func; use impl='auto', 'reference' or 'recurrent'"
        )
    if impl == "triton":
        reason = against_triton()
        if reason:
            raise ValueError(f"impl='triton' cannot serve this call: {reason}; use impl='auto'")
    if impl != "auto":
        return Choice(impl, "named by the caller")
    if one_token:
        plain = Choice("recurrent", "one token gains nothing from any other form of plain PyTorch")
    elif transformed and own_gradients:
        plain = Choice("reference", "quadratic, but made of operations that forward mode and torch.func see through")
    else:
        plain = Choice("chunked", f"linear time and memory, the fastest form on {like.device.type} of plain PyTorch")
    if like.device.type != "cuda" or transformed:
        return plain
    reason = f"{SWITCH}=0 turns kernels off" if switched_off() else against_triton()
    if reason:
        return Choice(plain.impl, f"{plain.reason}; no kernel: {reason}")
    return Choice("triton", "a fused GPU kernel serves the call")


def differentiated_otherwise() -> bool:
    """Whether forward mode, or a transform of ``torch.func`` other than ``vmap``, differentiates what is computed now.

    Operators with a formula of their own for gradients would give it a derivative of 0 without a word, or an error
    about themselves. ``torch.compile`` asks while it traces, where a transform that is inside of what it compiles is
    active too, and guards what it made by the transforms around it.

    Example:
        >>> derivative = torch.func.grad(lambda x: x * differentiated_otherwise())(torch.tensor(2.0))
        >>> differentiated_otherwise(), derivative.item()
        (False, 1.0)
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    transforms = torch._C._functorch.TransformType
    active = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (transforms.Grad, transforms.Jvp) for level in active)


# As torch.compiler.assume_constant_result marks it, without the import of torch._dynamo, which takes a second.
differentiated_otherwise._dynamo_marked_constant = True  # type: ignore[attr-defined]
