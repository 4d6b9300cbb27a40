"""Contract: a sequence that is cut anywhere, with the state passed on, gives what the whole sequence gives."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import (
    LENGTH,
    Inputs,
    Results,
    Subject,
    attend,
    attend_with_state,
    evaluate,
    named_state,
    subject_of,
    values,
)

CUTS: tuple[tuple[int, ...], ...] = ((1,), (33,), (64,), (LENGTH - 1,), (20, 21, 50))
STEPS = 9


def check_hand_over(mechanism: str | type[Mechanism] | Subject) -> list[str]:
    """Check pieces, single steps and packed pieces: outputs, final state and gradients through the state."""
    subject, passed = subject_of(mechanism), []
    if not subject.has_state:
        return []
    for impl, built in subject.forms(True).items():
        inputs = subject.inputs(built)
        case = f"{impl}, with and without state"
        subject.standard(built, inputs, _only_output, gradients=False).hold("hand_over", case, values(built, inputs))
        passed.append(case)
        whole = subject.standard(built, inputs, attend_with_state)
        for cuts in CUTS:
            case = f"{impl}, cut at {', '.join(map(str, cuts))}"
            whole.hold("hand_over", case, evaluate(built, inputs, partial(in_pieces, cuts=cuts)))
            passed.append(case)
        passed.append(_later_part(subject, built, inputs, f"{impl}, gradient through the state"))
    for grouped in subject.groupings(True):
        built = subject.build(True, grouped=grouped)
        case = f"step by step{', grouped heads' if grouped else ''}"
        inputs = subject.inputs(built, STEPS)
        found = evaluate(built, inputs, step_by_step)
        subject.standard(built, inputs, attend_with_state, steps=True).hold("hand_over", case, found)
        passed.append(case)
    if subject.info.state == "constant":
        passed.append(_packed(subject, "packed pieces"))
    return passed


def _only_output(mechanism: Mechanism, inputs: Inputs) -> Results:
    return {"output": attend_with_state(mechanism, inputs)["output"]}


def in_pieces(mechanism: Mechanism, inputs: Inputs, cuts: tuple[int, ...]) -> Results:
    state: Any = None
    outputs = []
    for start, stop in pairwise((0, *cuts, inputs.q.shape[2])):
        piece = inputs.tokens(slice(start, stop))
        output, state = mechanism.with_state(piece.q, piece.k, piece.v, state=state, x=piece.x)
        outputs.append(output)
    return {"output": torch.cat(outputs, dim=2), **named_state(state)}


def step_by_step(mechanism: Mechanism, inputs: Inputs) -> Results:
    state: Any = None
    outputs = []
    for t in range(inputs.q.shape[2]):
        x_t = None if inputs.x is None else inputs.x[:, t]
        output, state = mechanism.step(inputs.q[:, :, t], inputs.k[:, :, t], inputs.v[:, :, t], state, x=x_t)
        outputs.append(output)
    return {"output": torch.stack(outputs, dim=2), **named_state(state)}


def _later_part(subject: Subject, mechanism: Mechanism, inputs: Inputs, case: str) -> str:
    """Check that the second half gives the first half a gradient, although only the state connects them."""
    half = inputs.q.shape[2] // 2

    def from_pieces(m: Mechanism, i: Inputs) -> Results:
        return {"output": in_pieces(m, i, (half,))["output"][:, :, half:]}

    def from_whole(m: Mechanism, i: Inputs) -> Results:
        return {"output": attend(m, i)["output"][:, :, half:]}

    found = evaluate(mechanism, inputs, from_pieces)
    subject.standard(mechanism, inputs, from_whole).hold("hand_over", case, found)
    return case


def _packed(subject: Subject, case: str) -> str:
    """Check two packed sequences, each cut at its own place; the second pieces start from one state per row."""
    mechanism = subject.build(True)
    one, two = subject.inputs(mechanism, 67, batch=1, seed=1), subject.inputs(mechanism, 9, batch=1, seed=2)

    def packed(m: Mechanism, i: Inputs) -> Results:
        a, b = i.tokens(slice(0, 67)), i.tokens(slice(67, None))
        state: Any = None
        parts = []
        for (sa, ea), (sb, eb) in (((0, 3), (0, 9)), ((3, 67), (9, 9))):
            piece = _join(a.tokens(slice(sa, ea)), b.tokens(slice(sb, eb)))
            offsets = torch.tensor([0, ea - sa, ea - sa + eb - sb], device=piece.q.device)
            out, state = m.with_state(piece.q, piece.k, piece.v, state=state, cu_seqlens=offsets, x=piece.x)
            parts.append(out)
        order = [parts[0][:, :, :3], parts[1], parts[0][:, :, 3:]]
        return {"output": torch.cat(order, dim=2), **named_state(state)}

    def alone(m: Mechanism, i: Inputs) -> Results:
        a, b = (attend_with_state(m, i.tokens(part)) for part in (slice(0, 67), slice(67, None)))
        return {name: torch.cat([a[name], b[name]], dim=2 if name == "output" else 0) for name in a}

    both = _join(one, two)
    subject.standard(mechanism, both, alone).hold("hand_over", case, evaluate(mechanism, both, packed))
    return case


def _join(a: Inputs, b: Inputs) -> Inputs:
    joined = {n: torch.cat([t, b.named[n]], dim=2 if t.ndim == 4 else 1) for n, t in a.named.items()}
    return Inputs(**joined)
