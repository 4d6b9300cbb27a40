"""Every custom operator keeps PyTorch's own contract: schema, fake tensors, autograd, ahead-of-time tracing.

The calls are recorded while the library does real work, so a new operator is checked as soon as something uses it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.op_subjects import DIRECTIONS, KINDS, Variant
from contracts.places import GPU, PLACES
from linattn import list_mechanisms
from linattn.kernels.reflection import library, pairs_library  # noqa: F401 - operators that are imported late
from linattn.testing import subject_of
from linattn.testing.cases import Subject, attend, attend_with_state, evaluate

KERNELS = {name for name, op in OPDEFS.items() if op._init_fn.__module__.startswith("linattn.kernels.")}

Recorded = list[tuple[Callable[..., Any], tuple[Any, ...]]]


class Recorder(TorchDispatchMode):
    """Keeps each call of an operator of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Recorded = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if getattr(func, "namespace", None) == "linattn":
            assert not kwargs
            self.calls.append((func, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


def record(subject: Subject) -> Recorded:
    calls: Recorded = []
    for causal in subject.modes:
        built = subject.build(causal)
        inputs = subject.inputs(built, 70)
        with Recorder() as recorder:
            evaluate(built, inputs, attend_with_state if causal and subject.has_state else attend)
            packed = {"cu_seqlens": torch.tensor([0, 3, 3, 70], device=subject.device)}
            evaluate(built, inputs.row(0), lambda m, i, more=packed: attend(m, i, **more))
        calls += recorder.calls
    return calls


def opcheck(calls: Recorded) -> None:
    """Of calls that differ in their numbers alone, one: no check of PyTorch's depends on these."""
    apart = {(func, *map(_signature, args)): (func, args) for func, args in calls}
    for func, args in apart.values():
        differentiable = not func.name().endswith("_backward")
        own = [a.requires_grad_() if differentiable and isinstance(a, Tensor) and a.is_floating_point() else a
               for a in args]  # fmt: skip
        torch.library.opcheck(func, tuple(own))


def _signature(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return argument


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", KINDS, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    calls = record(variant.at(place))
    assert calls
    opcheck(calls)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", DIRECTIONS, ids=str)
def test_kernels_serve_what_they_are_said_to(variant: Variant) -> None:
    """What ``auto`` takes on a GPU is what runs there: no operator of another form."""
    others = {func.name() for func, _ in record(variant.at(GPU))} - KERNELS
    refused = variant.decay == "channel" and not variant.causal
    assert bool(others) == refused, others


def test_no_operator_is_left_out() -> None:
    """Whatever the library registers is met on the way through the mechanisms or the variants above."""
    subjects = [variant.subject for variant in DIRECTIONS] + [subject_of(name) for name in list_mechanisms()]
    seen = {func.name().split(".")[0] for subject in subjects for func, _ in record(subject)}
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    # Kernels run in the interpreter here, on small shapes: tests/kernels/test_operators.py checks theirs.
    assert {name for name in names if name.startswith("linattn::")} - KERNELS == seen
