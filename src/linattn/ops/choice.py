"""Which implementation serves a call, and why."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

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


def choose(impl: str, like: Tensor, against_triton: Callable[[], str], *, one_token: bool = False) -> Choice:
    """A named implementation is taken as it is, or refused; ``auto`` takes the fastest that is proved.

    That is kernels on a GPU wherever they serve the call, unless ``LINATTN_TRITON=0`` is set; elsewhere the chunked
    form, or the recurrent one for a single token. On a CPU kernels run in Triton's interpreter, for tests, by name.

    Args:
        impl: what the caller named, or ``"auto"``.
        like: an input of the call; its device counts.
        against_triton: says why kernels cannot serve it; empty if they can.
        one_token: whether the call is a step of decoding.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if impl == "triton":
        reason = against_triton()
        if reason:
            raise ValueError(f"impl='triton' cannot serve this call: {reason}; use impl='auto'")
    if impl != "auto":
        return Choice(impl, "named by the caller")
    if one_token:
        plain = Choice("recurrent", "one token gains nothing from any other form of plain PyTorch")
    else:
        plain = Choice("chunked", f"linear time and memory, the fastest form on {like.device.type} of plain PyTorch")
    if like.device.type != "cuda":
        return plain
    reason = f"{SWITCH}=0 turns kernels off" if switched_off() else against_triton()
    if reason:
        return Choice(plain.impl, f"{plain.reason}; no kernel: {reason}")
    return Choice("triton", "a fused GPU kernel serves the call")
