"""Which implementation serves a call, and why."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn.ops.checks import check_choice
from linattn.ops.triton.support import SWITCH, assume_constant, switched_off

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

    Under forward mode or a transform of ``torch.func`` that differentiates, ``auto`` takes no kernel, and the
    reference form where the chunked one would not be differentiated correctly; these two are refused by name.

    Args:
        impl: what the caller named, or ``"auto"``.
        like: an input of the call; its device counts.
        against_triton: says why kernels cannot serve it; empty if they can.
        one_token: whether the call is a step of decoding.
        own_gradients: whether the chunked form computes its gradients by a formula of its own, as kernels do. Only
            ``backward()`` knows such a formula.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    beyond_backward = differentiated_beyond_backward()
    if beyond_backward and (impl == "triton" or (own_gradients and impl == "chunked")):
        raise ValueError(
            f"impl={impl!r} can only be differentiated by backward(), not by forward mode or transforms of torch.func; "
            "use impl='auto', 'reference' or 'recurrent'"
        )
    if impl == "triton":
        reason = against_triton()
        if reason:
            raise ValueError(f"impl='triton' cannot serve this call: {reason}; use impl='auto'")
    if impl != "auto":
        return Choice(impl, "named by the caller")
    if one_token:
        plain = Choice("recurrent", "one token gains nothing from any other form of plain PyTorch")
    elif beyond_backward and own_gradients:
        plain = Choice(
            "reference", "quadratic, but forward mode and torch.func can differentiate each of its operations"
        )
    else:
        plain = Choice("chunked", f"linear time and memory, the fastest form on {like.device.type} of plain PyTorch")
    if like.device.type != "cuda" or beyond_backward:
        return plain
    reason = f"{SWITCH}=0 turns kernels off" if switched_off() else against_triton()
    if reason:
        return Choice(plain.impl, f"{plain.reason}; no kernel: {reason}")
    return Choice("triton", "a fused GPU kernel serves the call")


@assume_constant
def differentiated_beyond_backward() -> bool:
    """Whether forward mode or a transform such as ``torch.func.grad`` or ``jvp`` is differentiating at the moment.

    ``vmap`` does not count. Operators with a gradient formula of their own serve ``backward()`` alone: here they would
    give a derivative of 0 without any error, or an error about their internals.

    ``torch.compile`` takes the answer for a constant: it calls this while it traces, when the transforms inside the
    compiled function are active as well, and it compiles anew when the ``torch.func`` transforms around it change. It
    does not look out for ``dual_level``: there a function that was compiled before may lose its tangents, even if it
    consists of PyTorch's own operations.

    Example:
        >>> derivative = torch.func.grad(lambda x: x * differentiated_beyond_backward())(torch.tensor(2.0))
        >>> differentiated_beyond_backward(), derivative.item()
        (False, 1.0)
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    transforms = torch._C._functorch.TransformType
    active = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (transforms.Grad, transforms.Jvp) for level in active)
