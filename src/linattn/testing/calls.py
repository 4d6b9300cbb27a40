"""Contracts on what a call takes: it compiles into one graph; states, operations and memory grow as declared."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.testing.cases import LENGTH, Call, Subject, attend, contract, evaluate, named_state, values
from linattn.testing.sequences import in_pieces, step_by_step
from linattn.testing.violation import EXACT, ContractViolation, distance

CALLS = ("masked", "packed", "with state", "step")
LENGTHS = (1, 5, 70)


@contract
def check_compile(subject: Subject, backend: str = "aot_eager", calls: Sequence[str] = CALLS) -> Iterator[str]:
    """Check that ``torch.compile(fullgraph=True)`` equals eager mode: masked, packed, with a state, and one step.

    The default backend traces and partitions like the real one, but without the minutes of code generation.
    """
    mask = torch.arange(LENGTH).expand(2, -1) < torch.tensor([[LENGTH], [40]])
    known: dict[str, Call] = {
        "masked": partial(attend, key_mask=mask.to(subject.device)),
        "packed": partial(attend, cu_seqlens=torch.tensor([0, 3, LENGTH], device=subject.device)),
        "with state": partial(in_pieces, cuts=(30,)),
        "step": step_by_step,
    }
    for causal in subject.modes:
        built = subject.build(causal)
        inputs = subject.inputs(built)
        for kind in CALLS if causal and subject.has_state else CALLS[:2]:
            if kind not in calls:
                continue
            own = inputs.row(0) if kind == "packed" else inputs.tokens(slice(0, 1)) if kind == "step" else inputs
            case = f"{'causal' if causal else 'bidirectional'}, {kind}, {backend}"
            torch.compiler.reset()
            try:
                found = evaluate(built, own, torch.compile(known[kind], fullgraph=True, backend=backend))
            except Exception as error:
                raise ContractViolation(case, f"{type(error).__name__}: {error}") from error
            yield subject.standard(built, own, known[kind]).hold(case, found)
    torch.compiler.reset()


@contract
def check_scaling(subject: Subject) -> Iterator[str]:
    """Check that ``state_size`` is true and that it, ``flops`` and the largest tensor made grow as declared."""
    if subject.info.causal:
        exact = replace(subject, dtype=torch.float64)
        yield from _states(exact) if subject.has_state else [_no_state_indeed(exact)]
    for causal in subject.modes:
        built, mode = subject.build(causal), "causal" if causal else "bidirectional"
        linear = subject.info.cost == "linear"
        one, two = built.flops(512), built.flops(1024)
        if (two == 2 * one) != linear or two < 2 * one:
            what = f"cost {subject.info.cost!r} is declared, but flops go from {one} to {two} when the tokens double"
            raise ContractViolation(f"{mode}, flops", what)
        yield f"{mode}, flops"
        sizes = []
        for length in (512, 1024) if linear else ():
            with _LargestTensor() as seen:
                values(built, subject.inputs(built, length, batch=1))
            sizes.append(seen.numel)
        if linear and sizes[1] > 2 * sizes[0]:
            what = f"largest tensor goes from {sizes[0]} to {sizes[1]} when the tokens double, allowed {2 * sizes[0]}"
            raise ContractViolation(f"{mode}, memory", what)
        if linear:
            yield f"{mode}, memory"


def _states(subject: Subject) -> Iterator[str]:
    built = subject.build(True)
    for length in LENGTHS:
        inputs, case = subject.inputs(built, length, batch=1), f"state after {length} tokens"
        state = named_state(built.with_state(inputs.q, inputs.k, inputs.v, x=inputs.x).state)
        real = sum(t.numel() for t in state.values())
        if built.state_size(length) != real:
            raise ContractViolation(case, f"state_size says {built.state_size(length)}, found {real}")
        yield case
    sizes = [built.state_size(length) for length in LENGTHS]
    if ("constant" if len(set(sizes)) == 1 else "growing") != subject.info.state:
        what = f"state {subject.info.state!r} is declared, but the sizes after {LENGTHS} tokens are {sizes}"
        raise ContractViolation("declaration", what)
    yield "declaration"


def _no_state_indeed(subject: Subject) -> str:
    """Check that there really is no state: declaring too little is wrong as well, as it would hide decoding."""
    built = subject.build(True)
    vars(built)["info"] = replace(subject.info, state="constant")
    inputs = subject.inputs(built)
    try:
        pieces = in_pieces(built, inputs, (33,))["output"]
    except Exception:  # any refusal shows that there is no state
        return "declaration"
    if distance(pieces, attend(built, inputs)["output"]) <= EXACT:
        raise ContractViolation("declaration", "a state can be handed over, but state='none' is declared")
    return "declaration"


class _LargestTensor(TorchDispatchMode):
    """Records the size of the largest memory that holds an operator's result (a view counts its base)."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return result
