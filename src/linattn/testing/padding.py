"""Contract: padding changes nothing; key_mask, cu_seqlens and one sequence at a time agree."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import LENGTH, Inputs, Results, Subject, attend, attend_with_state, evaluate, subject_of

PACKED = (3, 0, LENGTH - 5, 1, 0)  # empty sequences inside and at the end, and one longer than a chunk


def check_padding(mechanism: str | type[Mechanism] | Subject) -> list[str]:
    """Check that values, gradients and states are those of the real tokens alone, whatever the padding holds."""
    subject, passed = subject_of(mechanism), []
    masks = _masks(subject.device)
    for label, impl, built in subject.each_form():
        state = built.causal and subject.has_state
        for where, mask in masks.items():
            if impl == "recurrent" and where != "scattered":
                continue  # a loop over tokens has no special ends, and it is slow
            passed += _masked(subject, built, mask, state, f"{label}, {where}")
        passed.append(_packed(subject, built, PACKED, state, f"{label}, packed {PACKED}"))
    for causal in subject.modes:
        if True in subject.groupings(causal):
            built, state = subject.build(causal, grouped=True), causal and subject.has_state
            passed += _masked(subject, built, masks["scattered"], state, f"grouped heads, causal={causal}")
    return passed


def _masks(device: str) -> dict[str, Tensor]:
    """Two rows each: one with much padding, one with less or none."""
    t = torch.arange(LENGTH)
    masks = {
        "padding right": torch.stack([t < 40, t < LENGTH]),
        "padding left": torch.stack([t >= 30, t >= 1]),
        "scattered": torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6,
    }
    return {where: mask.to(device) for where, mask in masks.items()}


def _masked(subject: Subject, mechanism: Mechanism, mask: Tensor, state: bool, case: str) -> list[str]:
    inputs = subject.inputs(mechanism)
    standard = subject.standard(mechanism, inputs, partial(_rows_alone, mask=mask, state=state))
    kinds = {
        "1e4 as padding": inputs.fill(~mask, 1e4),
        # The output of a masked query is not read, so only k and v, which other tokens would read, are made NaN.
        "NaN as padding": inputs.fill(~mask, float("nan"), ("k", "v")),
    }
    for kind, filled in kinds.items():
        found = evaluate(mechanism, filled, partial(_rows_masked, mask=mask, state=state))
        standard.hold("padding", f"{case}, {kind}", found)
    return [f"{case}, {kind}" for kind in kinds]


def _packed(subject: Subject, mechanism: Mechanism, lengths: tuple[int, ...], state: bool, case: str) -> str:
    inputs = subject.inputs(mechanism, sum(lengths), batch=1)
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    found = evaluate(mechanism, inputs, partial(_pieces_packed, offsets=offsets, state=state))
    alone = partial(_pieces_alone, offsets=offsets, state=state)
    subject.standard(mechanism, inputs, alone).hold("padding", case, found)
    return case


def _run(mechanism: Mechanism, inputs: Inputs, state: bool, **more: Tensor | None) -> Results:
    return (attend_with_state if state else attend)(mechanism, inputs, **more)


def _rows_masked(mechanism: Mechanism, inputs: Inputs, mask: Tensor, state: bool) -> Results:
    results = _run(mechanism, inputs, state, key_mask=mask)
    # A growing cache keeps slots for padding, so only states of constant size can be compared directly.
    return {"output": results.pop("output").transpose(1, 2)[mask]} | (results if _fixed(mechanism, state) else {})


def _rows_alone(mechanism: Mechanism, inputs: Inputs, mask: Tensor, state: bool) -> Results:
    rows = [_run(mechanism, inputs.row(b).tokens(mask[b].nonzero()[:, 0]), state) for b in range(len(mask))]
    output = torch.cat([row.pop("output").transpose(1, 2)[0] for row in rows])
    states = {name: torch.cat([row[name] for row in rows]) for name in rows[0]} if _fixed(mechanism, state) else {}
    return {"output": output, **states}


def _pieces_packed(mechanism: Mechanism, inputs: Inputs, offsets: list[int], state: bool) -> Results:
    device = inputs.q.device
    results = _run(mechanism, inputs, state, cu_seqlens=torch.tensor(offsets, device=device))
    full = torch.tensor([n for n, (s, e) in enumerate(pairwise(offsets)) if s < e], device=device)
    states = {name: t[full] for name, t in results.items() if name != "output"} if _fixed(mechanism, state) else {}
    return {"output": results["output"], **states}


def _pieces_alone(mechanism: Mechanism, inputs: Inputs, offsets: list[int], state: bool) -> Results:
    pieces = [_run(mechanism, inputs.tokens(slice(s, e)), state) for s, e in pairwise(offsets) if s < e]
    output = torch.cat([piece.pop("output") for piece in pieces], dim=2)
    states = {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]} if _fixed(mechanism, state) else {}
    return {"output": output, **states}


def _fixed(mechanism: Mechanism, state: bool) -> bool:
    return state and mechanism.state_size(1) == mechanism.state_size(2)
