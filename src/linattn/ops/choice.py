"""Which implementation serves a call, and why."""

from typing import NamedTuple

from torch import Tensor

from linattn.ops.checks import check_choice

IMPLEMENTATIONS = ("reference", "recurrent", "chunked")


class Choice(NamedTuple):
    """An implementation and the reason it was taken; ``print`` shows both."""

    impl: str
    reason: str

    def __str__(self) -> str:
        return f"{self.impl}: {self.reason}"


def choose(impl: str, q: Tensor) -> Choice:
    """A named implementation is taken as it is; ``auto`` takes the fastest one that serves the call."""
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if impl != "auto":
        return Choice(impl, "named by the caller")
    where = f"on {q.device.type}"
    return Choice("chunked", f"linear time and memory, the fastest exact form {where}")
