"""Contract: a wrong call raises ValueError or TypeError and names the argument that is wrong."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import Inputs, Subject, attend, subject_of
from linattn.testing.violation import ContractViolation

LENGTH = 6


class Wrong(NamedTuple):
    """A wrong call, and words of which its error message must contain at least one."""

    case: str
    names: str
    call: Callable[[], Any]


class OtherState(NamedTuple):
    """A state that no mechanism here knows."""

    memory: torch.Tensor


def check_bad_input(mechanism: str | type[Mechanism] | Subject) -> list[str]:
    """Check wrong shapes, dtypes, devices, head counts, masks, offsets, x, states, lengths and options."""
    subject, passed = subject_of(mechanism), []
    for causal in subject.modes:
        mode = "causal" if causal else "bidirectional"
        built = subject.build(causal)
        inputs = subject.inputs(built, LENGTH)
        wrongs = [*_tensors(built, inputs), *_masks(built, inputs), *_input(subject, built, inputs), *_sizes(built)]
        wrongs += _options(subject, causal)
        wrongs += _states(subject, built, inputs) if causal and subject.has_state else _no_state(built, inputs)
        for wrong in wrongs:
            _must_raise(wrong, f"{mode}, {wrong.case}")
            passed.append(f"{mode}, {wrong.case}")
    return passed


def _must_raise(wrong: Wrong, case: str) -> None:
    allowed = f"allowed: ValueError or TypeError with {wrong.names.replace('|', ' or ')}"
    try:
        wrong.call()
    except (ValueError, TypeError) as error:
        if re.search(rf"\b({wrong.names})\b", str(error)):
            return
        raise ContractViolation("bad_input", case, f"found {type(error).__name__}: {error}; {allowed}") from error
    except Exception as error:
        raise ContractViolation("bad_input", case, f"found {type(error).__name__}: {error}; {allowed}") from error
    raise ContractViolation("bad_input", case, f"nothing was raised; {allowed}")


def _tensors(m: Mechanism, i: Inputs) -> list[Wrong]:
    def given(**changes: torch.Tensor) -> Callable[[], Any]:
        return lambda: attend(m, replace(i, **changes))

    twice = Inputs(i.q.repeat(1, 2, 1, 1), i.k.repeat(1, 2, 1, 1), i.v.repeat(1, 2, 1, 1), i.x)
    return [
        Wrong("q without heads", "q", given(q=i.q[:, 0])),
        Wrong("k one channel narrower", "k|head_dim", given(k=i.k[..., :-1])),
        Wrong("v shorter than k", "v", given(v=i.v[:, :, :-1])),
        Wrong("k of another batch size", "k", given(k=i.k[:1])),
        Wrong("integer q", "q", given(q=i.q.long())),
        Wrong("v of another dtype", "v", given(v=i.v.float())),
        Wrong("k on another device", "k", given(k=i.k.to("meta"))),
        Wrong("one query head too many", "q|heads", given(q=torch.cat([i.q, i.q[:, :1]], dim=1))),
        Wrong("twice the heads", "q|heads|num_heads", lambda: attend(m, twice)),
    ]


def _masks(m: Mechanism, i: Inputs) -> list[Wrong]:
    ones = torch.ones(i.q.shape[0], LENGTH, dtype=torch.bool)

    def masked(mask: Any) -> Callable[[], Any]:
        return lambda: attend(m, i, key_mask=mask)

    def packed(offsets: list[int], batch: int = 1) -> Callable[[], Any]:
        return lambda: attend(m, i.change(lambda t: t[:batch]), cu_seqlens=torch.tensor(offsets))

    return [
        Wrong("mask one token too long", "key_mask", masked(torch.cat([ones, ones[:, :1]], dim=1))),
        Wrong("mask of numbers", "key_mask", masked(ones.double())),
        Wrong("offsets that end early", "cu_seqlens", packed([0, LENGTH - 1])),
        Wrong("offsets that decrease", "cu_seqlens", packed([0, 4, 2, LENGTH])),
        Wrong("offsets for two rows", "cu_seqlens", packed([0, 2, LENGTH], batch=2)),
    ]


def _input(subject: Subject, m: Mechanism, i: Inputs) -> list[Wrong]:
    if i.x is None:
        return []
    narrow = i.x[..., :-1]
    return [
        Wrong("no x", "x", lambda: attend(m, replace(i, x=None))),
        Wrong("x one channel narrower", "x", lambda: attend(m, replace(i, x=narrow))),
    ]


def _sizes(m: Mechanism) -> list[Wrong]:
    return [
        Wrong("state_size of -1 tokens", "length", lambda: m.state_size(-1)),
        Wrong("flops of -1 tokens", "length", lambda: m.flops(-1)),
    ]


def _options(subject: Subject, causal: bool) -> list[Wrong]:
    def built(**changes: Any) -> Callable[[], Any]:
        options = {"num_heads": 4, "head_dim": 8, "causal": causal, **subject.options, **changes}
        return lambda: subject.cls(**options)

    return [
        Wrong("unknown impl", "impl", built(impl="fastest")),
        Wrong("no heads", "num_heads", built(num_heads=0)),
        Wrong("key heads that do not divide the heads", "heads|num_kv_heads", built(num_kv_heads=3)),
        Wrong("unknown option", "temperature_of_the_sea", built(temperature_of_the_sea=1)),
    ]


def _states(subject: Subject, m: Mechanism, i: Inputs) -> list[Wrong]:
    def start(state: Any) -> Callable[[], Any]:
        return lambda: m.with_state(i.q, i.k, i.v, state=state, x=i.x)

    x = None if i.x is None else i.x[:, 0]
    other_batch = m.with_state(*(t[:1] for t in (i.q, i.k, i.v)), x=None if i.x is None else i.x[:1]).state
    return [
        Wrong("state of another mechanism", "state|initial_state", start(OtherState(torch.zeros(2, 3)))),
        Wrong("a number for a state", "state|initial_state", start(3.0)),
        Wrong("state of another batch", r"\w*state(\.\w+)?", start(other_batch)),
        Wrong("a step over many tokens", "q_t", lambda: m.step(i.q, i.k, i.v, None, x=x)),
    ]


def _no_state(m: Mechanism, i: Inputs) -> list[Wrong]:
    return [Wrong("asks for a state", "state", lambda: m.with_state(i.q, i.k, i.v, x=i.x))]
