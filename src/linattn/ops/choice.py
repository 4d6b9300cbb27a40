"""Which implementation serves a call, and why."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from linattn.ops.checks import check_choice

# These take every call, every dtype and every device; kernels take what they were written for.
FORMS = ("reference", "recurrent", "chunked")
IMPLEMENTATIONS = (*FORMS, "triton")


class Choice(NamedTuple):
    """An implementation and the reason it was taken; ``print`` shows both."""

    impl: str
    reason: str

    def __str__(self) -> str:
        return f"{self.impl}: {self.reason}"


def choose(impl: str, q: Tensor, against_triton: Callable[[], str]) -> Choice:
    """A named implementation is taken as it is, or refused; ``auto`` takes the fastest that is proved.

    ``against_triton`` says why kernels cannot serve it; empty if they can.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if impl not in ("auto", "triton"):
        return Choice(impl, "named by the caller")
    if impl == "triton":
        reason = against_triton()
        if reason:
            raise ValueError(f"impl='triton' cannot serve this call: {reason}; use impl='auto'")
        return Choice(impl, "named by the caller")
    # Kernels are taken by name alone until every contract has been held on a GPU.
    return Choice("chunked", f"linear time and memory, the fastest proved form on {q.device.type}")
