"""Contract: a wrong call raises ValueError or TypeError and names the argument that is wrong."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import Inputs, Subject, attend, contract
from linattn.testing.violation import ContractViolation

LENGTH = 6
# A wrong call: its case, words of which its error message must contain at least one, and what calls.
Wrong = tuple[str, str, Callable[[], Any]]


class OtherState(NamedTuple):
    """A state that no mechanism here knows."""

    memory: torch.Tensor


@contract
def check_bad_input(subject: Subject) -> Iterator[str]:
    """Check wrong shapes, dtypes, devices, head counts, masks, offsets, x, states, lengths and options."""
    for causal in subject.modes:
        built = subject.build(causal)
        inputs = subject.inputs(built, LENGTH)
        state = _states(built, inputs) if causal and subject.has_state else _no_state(built, inputs)
        for case, names, call in [*_tensors(built, inputs), *_masks(built, inputs), *_options(subject, built), *state]:
            yield _must_raise(f"{'causal' if causal else 'bidirectional'}, {case}", names, call)


def _must_raise(case: str, names: str, call: Callable[[], Any]) -> str:
    allowed = f"allowed: ValueError or TypeError with {names.replace('|', ' or ')}"
    try:
        call()
    except Exception as error:
        if isinstance(error, ValueError | TypeError) and re.search(rf"\b({names})\b", str(error)):
            return case
        raise ContractViolation(case, f"found {type(error).__name__}: {error}; {allowed}") from error
    raise ContractViolation(case, f"nothing was raised; {allowed}")


def _tensors(m: Mechanism, i: Inputs) -> Iterator[Wrong]:
    def given(**changes: Any) -> Callable[[], Any]:
        return lambda: attend(m, replace(i, **changes))

    yield "q without heads", "q", given(q=i.q[:, 0])
    yield "k one channel narrower", "k|head_dim", given(k=i.k[..., :-1])
    yield "v shorter than k", "v", given(v=i.v[:, :, :-1])
    yield "k of another batch size", "k", given(k=i.k[:1])
    yield "integer q", "q", given(q=i.q.long())
    yield "v of another dtype", "v", given(v=i.v.float())
    yield "k on another device", "k", given(k=i.k.to("meta"))
    yield "one query head too many", "q|heads", given(q=torch.cat([i.q, i.q[:, :1]], dim=1))
    twice = {name: t.repeat(1, 2, 1, 1) for name, t in i.named.items() if name != "x"}
    yield "twice the heads", "q|heads|num_heads", given(**twice)
    if i.x is not None:
        yield "no x", "x", given(x=None)
        yield "x one channel narrower", "x", given(x=i.x[..., :-1])


def _masks(m: Mechanism, i: Inputs) -> Iterator[Wrong]:
    ones = torch.ones(i.q.shape[0], LENGTH, dtype=torch.bool)
    yield "mask one token too long", "key_mask", partial(attend, m, i, key_mask=torch.cat([ones, ones[:, :1]], dim=1))
    yield "mask of numbers", "key_mask", partial(attend, m, i, key_mask=ones.double())

    def packed(offsets: list[int], batch: int = 1) -> Callable[[], Any]:
        return partial(attend, m, i.change(lambda t: t[:batch]), cu_seqlens=torch.tensor(offsets))

    yield "offsets that end early", "cu_seqlens", packed([0, LENGTH - 1])
    yield "offsets that decrease", "cu_seqlens", packed([0, 4, 2, LENGTH])
    yield "offsets for two rows", "cu_seqlens", packed([0, 2, LENGTH], batch=2)


def _options(subject: Subject, m: Mechanism) -> Iterator[Wrong]:
    yield "state_size of -1 tokens", "length", lambda: m.state_size(-1)
    yield "flops of -1 tokens", "length", lambda: m.flops(-1)

    def built(**changes: Any) -> Callable[[], Any]:
        return partial(subject.cls, **{"num_heads": 4, "head_dim": 8, "causal": m.causal, **subject.options, **changes})

    yield "unknown impl", "impl", built(impl="fastest")
    yield "no heads", "num_heads", built(num_heads=0)
    yield "key heads that do not divide the heads", "heads|num_kv_heads", built(num_kv_heads=3)
    yield "unknown option", "temperature_of_the_sea", built(temperature_of_the_sea=1)


def _states(m: Mechanism, i: Inputs) -> Iterator[Wrong]:
    def start(state: Any) -> Callable[[], Any]:
        return partial(m.with_state, i.q, i.k, i.v, state=state, x=i.x)

    yield "state of another mechanism", "state|initial_state", start(OtherState(torch.zeros(2, 3)))
    yield "a number for a state", "state|initial_state", start(3.0)
    one, x = i.row(0), None if i.x is None else i.x[:, 0]
    other_batch = m.with_state(one.q, one.k, one.v, x=one.x).state
    yield "state of another batch", r"\w*state(\.\w+)?", start(other_batch)
    yield "a step over many tokens", "q_t", partial(m.step, i.q, i.k, i.v, None, x=x)


def _no_state(m: Mechanism, i: Inputs) -> Iterator[Wrong]:
    yield "asks for a state", "state", partial(m.with_state, i.q, i.k, i.v, x=i.x)
