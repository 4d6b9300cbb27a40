"""Contracts on sequences: the future does not reach the past, padding changes nothing, a state hands over all of it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import (
    LENGTH,
    Inputs,
    Results,
    Subject,
    attend,
    attend_with_state,
    contract,
    evaluate,
    named_state,
    random_like,
    values,
)
from linattn.testing.violation import ContractViolation, largest

# Of the future: one expects equal bits, but a form may choose another order of summation.
SAME = 1e-12
PACKED = (3, 0, LENGTH - 5, 1, 0)  # empty sequences inside and at the end, and one longer than a chunk
CUTS: tuple[tuple[int, ...], ...] = ((1,), (33,), (64,), (LENGTH - 1,), (20, 21, 50))


@contract
def check_causality(subject: Subject) -> Iterator[str]:
    """Check that another future, even a huge one, does not change past outputs, and gets no gradient from them."""
    for impl, built in (subject.forms(True) if subject.info.causal else {}).items():
        inputs = subject.inputs(built)
        for (cut,) in CUTS[:4]:
            past = partial(_past, cut=cut)
            standard = subject.standard(built, inputs, past, gradients=False)
            for size in (1.0, 1e3):
                changed = values(built, _other_future(inputs, cut, size), past)
                yield standard.hold(f"{impl}, future from token {cut} changed by {size:g}", changed, SAME)
            case, found = f"{impl}, gradient from before token {cut}", evaluate(built, inputs, past)
            for name, t in inputs.named.items():
                gradient = found[f"gradient of {name}"]
                if leak := largest(gradient[:, :, cut:] if t.ndim == 4 else gradient[:, cut:]):
                    raise ContractViolation(case, f"gradient of {name} after it is {leak:.3g}, allowed 0")
            yield case


def _past(mechanism: Mechanism, inputs: Inputs, cut: int) -> Results:
    return {"past": attend(mechanism, inputs)["output"][:, :, :cut]}


def _other_future(inputs: Inputs, cut: int, size: float) -> Inputs:
    future = torch.arange(inputs.q.shape[2], device=inputs.q.device)[:, None] >= cut
    return inputs.change(lambda t: torch.where(future, t + size * random_like(t, seed=2), t))


@contract
def check_padding(subject: Subject) -> Iterator[str]:
    """Check that values, gradients and states are those of the real tokens alone, whatever the padding holds."""
    t = torch.arange(LENGTH)
    masks = {  # two rows each: one with much padding, one with less or none
        "padding right": torch.stack([t < 40, t < LENGTH]),
        "padding left": torch.stack([t >= 30, t >= 1]),
        "scattered": torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6,
    }
    for label, impl, built in subject.each_form():
        for where, mask in masks.items():
            if impl == "recurrent" and where != "scattered":
                continue  # a loop over tokens has no special ends, and it is slow
            yield from _masked(subject, built, mask.to(subject.device), f"{label}, {where}")
        inputs = subject.inputs(built, sum(PACKED), batch=1)
        offsets = [0, *accumulate(PACKED)]
        packed, alone = (partial(run, offsets=offsets, subject=subject) for run in (_pieces_packed, _pieces_alone))
        standard = subject.standard(built, inputs, alone)
        yield standard.hold(f"{label}, packed {PACKED}", evaluate(built, inputs, packed))
    for causal in subject.modes:
        if True in subject.groupings(causal):
            built, mask = subject.build(causal, grouped=True), masks["scattered"].to(subject.device)
            yield from _masked(subject, built, mask, f"grouped heads, causal={causal}")


def _masked(subject: Subject, mechanism: Mechanism, mask: Tensor, case: str) -> Iterator[str]:
    inputs = subject.inputs(mechanism)
    standard = subject.standard(mechanism, inputs, partial(_rows_alone, mask=mask, subject=subject))
    broken = inputs.fill(~mask, float("nan"))
    kinds = {
        "1e4 as padding": inputs.fill(~mask, 1e4),
        # The output of a masked query is not read, so only k and v, which other tokens would read, are made NaN.
        "NaN as padding": replace(inputs, k=broken.k, v=broken.v),
    }
    for kind, filled in kinds.items():
        found = evaluate(mechanism, filled, partial(_rows_masked, mask=mask, subject=subject))
        yield standard.hold(f"{case}, {kind}", found)


def _run(mechanism: Mechanism, inputs: Inputs, subject: Subject, **more: Tensor) -> Results:
    """The output, and the state where it has one size: a growing cache keeps slots for padding."""
    if not (mechanism.causal and subject.has_state):
        return attend(mechanism, inputs, **more)
    results = attend_with_state(mechanism, inputs, **more)
    return results if mechanism.state_size(1) == mechanism.state_size(2) else {"output": results["output"]}


def _rows_masked(mechanism: Mechanism, inputs: Inputs, mask: Tensor, subject: Subject) -> Results:
    results = _run(mechanism, inputs, subject, key_mask=mask)
    return results | {"output": results["output"].transpose(1, 2)[mask]}


def _rows_alone(mechanism: Mechanism, inputs: Inputs, mask: Tensor, subject: Subject) -> Results:
    rows = [_run(mechanism, inputs.row(b).tokens(mask[b].nonzero()[:, 0]), subject) for b in range(len(mask))]
    output = torch.cat([row["output"].transpose(1, 2)[0] for row in rows])
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name != "output"} | {"output": output}


def _pieces_packed(mechanism: Mechanism, inputs: Inputs, offsets: list[int], subject: Subject) -> Results:
    results = _run(mechanism, inputs, subject, cu_seqlens=torch.tensor(offsets, device=inputs.q.device))
    full = [n for n, (start, end) in enumerate(pairwise(offsets)) if start < end]
    return {name: t if name == "output" else t[full] for name, t in results.items()}


def _pieces_alone(mechanism: Mechanism, inputs: Inputs, offsets: list[int], subject: Subject) -> Results:
    pieces = [_run(mechanism, inputs.tokens(slice(s, e)), subject) for s, e in pairwise(offsets) if s < e]
    return {name: torch.cat([piece[name] for piece in pieces], 2 if name == "output" else 0) for name in pieces[0]}


@contract
def check_hand_over(subject: Subject) -> Iterator[str]:
    """Check pieces, single steps and packed pieces: outputs, final state and gradients through the state."""
    if not subject.has_state:
        return
    half = LENGTH // 2
    for impl, built in subject.forms(True).items():
        inputs = subject.inputs(built)
        output = subject.standard(built, inputs, lambda m, i: _end(attend_with_state(m, i), 0), gradients=False)
        yield output.hold(f"{impl}, with and without state", values(built, inputs))
        whole = subject.standard(built, inputs, attend_with_state)
        for cuts in CUTS:
            found = evaluate(built, inputs, partial(in_pieces, cuts=cuts))
            yield whole.hold(f"{impl}, cut at {', '.join(map(str, cuts))}", found)
        # Only the state connects the second half with the first.
        later = subject.standard(built, inputs, lambda m, i: _end(attend(m, i), half))
        found = evaluate(built, inputs, lambda m, i: _end(in_pieces(m, i, (half,)), half))
        yield later.hold(f"{impl}, gradient through the state", found)
    for grouped in subject.groupings(True):
        built = subject.build(True, grouped=grouped)
        inputs = subject.inputs(built, 9)
        standard = subject.standard(built, inputs, attend_with_state, steps=True)
        case = f"step by step{', grouped heads' if grouped else ''}"
        yield standard.hold(case, evaluate(built, inputs, step_by_step))
    if subject.info.state == "constant":
        built = subject.build(True)
        both = _join(*(subject.inputs(built, *sizes) for sizes in ((67, 1, 1), (9, 1, 2))))
        alone = partial(_pieces_alone, offsets=[0, 67, 76], subject=subject)
        standard = subject.standard(built, both, alone)
        yield standard.hold("packed pieces", evaluate(built, both, _two_packed))


def _end(results: Results, start: int) -> Results:
    return {"output": results["output"][:, :, start:]}


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


def _two_packed(mechanism: Mechanism, inputs: Inputs) -> Results:
    """Sequences of 67 and 9 tokens, each cut at its own place; the second pieces start from one state per row."""
    a, b = inputs.tokens(slice(0, 67)), inputs.tokens(slice(67, None))
    state: Any = None
    parts = []
    for (sa, ea), (sb, eb) in (((0, 3), (0, 9)), ((3, 67), (9, 9))):
        piece = _join(a.tokens(slice(sa, ea)), b.tokens(slice(sb, eb)))
        offsets = torch.tensor([0, ea - sa, ea - sa + eb - sb], device=piece.q.device)
        out, state = mechanism.with_state(piece.q, piece.k, piece.v, state=state, cu_seqlens=offsets, x=piece.x)
        parts.append(out)
    order = [parts[0][:, :, :3], parts[1], parts[0][:, :, 3:]]
    return {"output": torch.cat(order, dim=2), **named_state(state)}


def _join(a: Inputs, b: Inputs) -> Inputs:
    return Inputs(**{n: torch.cat([t, b.named[n]], dim=2 if t.ndim == 4 else 1) for n, t in a.named.items()})
