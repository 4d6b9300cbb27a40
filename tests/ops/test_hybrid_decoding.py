"""Hybrid attention in the layout of decoding: what one call over all tokens gives, whenever a row's chunk ends."""

import pytest
import torch
from tests.ops.hybrid_cases import F64, SETTINGS, assert_same, call, change, make

from linattn.ops.hybrid.decoding import Setting, begin, serves, whole
from linattn.ops.hybrid.decoding_step import hybrid_attention_decode
from linattn.ops.hybrid.types import SalientBudget, Window

MORE = {
    "delays_and_cap": {"window": 3, "layout": "chunks", "delay": 2, "budget": SalientBudget(2 / 3, 3, cap=4)},
    "chunks_of_sinks": {"window": 4, "layout": "chunks", "budget": SalientBudget(1 / 4, 4, cap=7, sinks=6)},
    "sliding_one": {"window": 5, "units": "one"},
}


def setting_of(options, width=5):
    window = Window(options["window"], options.get("layout", "sliding"), options.get("delay", 1))
    return Setting(window, options.get("budget"), width**-0.5)


ALL = SETTINGS | MORE
SERVED = [name for name, options in ALL.items() if serves(setting_of(options).window, options.get("budget"))]


def started(inputs, mask, cut, options):
    """The state after ``cut`` tokens, laid out for decoding."""
    _, state = call(change(inputs, lambda x: x[:, :, :cut]), True, key_mask=mask[:, :cut], **options)
    return begin(state, setting_of(options), 2)


def mapped(f, state):
    """``f`` of every tensor of a state."""
    if isinstance(state, tuple):
        return type(state)(*(mapped(f, x) for x in state))
    return f(state) if isinstance(state, torch.Tensor) else state


def decode(inputs, t, state, options):
    now = change(inputs, lambda x: x[:, :, t : t + 1])
    units = options.get("units", "row_max")
    return hybrid_attention_decode(now.pop("q"), now.pop("k"), now.pop("v"), state.here(), units=units, **now)


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_rows_that_end_chunks_at_different_steps(name):
    """Steps after prefill with left padding, rows chosen and reordered between them, and prefill after steps."""
    options, inputs = ALL[name], make(34, B=3, gate=name in ("cap", "chunks", "one"))
    mask = torch.arange(34) >= torch.tensor([0, 2, 7])[:, None]
    wanted = call(inputs, key_mask=mask, **options)
    state = started(inputs, mask, 13, options)
    for t in range(13, 34):
        if t == 20:
            rows = torch.tensor([2, 0, 2, 1])
            state = mapped(lambda x, rows=rows: x[rows], state)
            inputs, wanted = change(inputs, lambda x, rows=rows: x[rows]), wanted[rows]
        output, state = decode(inputs, t, state, options)
        assert_same(output, wanted[:, :, t : t + 1])
        if t in (18, 25):  # in the middle of a chunk of some rows: on as a whole, and from there by steps again
            state = whole(state)
            rest = call(
                change(inputs, lambda x, t=t: x[:, :, t + 1 :]), initial_state=state, with_state=True, **options
            )
            assert_same(rest.output, wanted[:, :, t + 1 :])
            state = begin(state, setting_of(options), 2)


@pytest.mark.parametrize("name", ["sliding", "chunks", "cap", "ratio", "one"])
@torch.no_grad()
def test_equal_rows_from_the_first_tokens_on_and_without_features(name):
    """The window is not full at first; rows need no mask, and repeated ones are known without asking."""
    options, inputs = ALL[name], make(30, B=1)
    del inputs["features"]
    wanted, mask = call(inputs, **options), torch.ones(1, 30, dtype=torch.bool)
    state = started(inputs, mask, 1, options)
    for t in range(1, 30):
        output, state = decode(inputs, t, state, options)
        assert_same(output, wanted[:, :, t : t + 1])
    twice = mapped(lambda x: x.repeat_interleave(2, 0), state)
    twice = twice._replace(length=torch.empty(2, dtype=torch.int64, device="meta"))  # which nobody can read
    assert twice.lengths() == (30, 30)


@torch.no_grad()
def test_16_bits_stay_as_close_as_other_steps():
    options, inputs = ALL["cap"], make(30, B=2, scores=False, dtype=torch.bfloat16)
    mask = torch.arange(30) >= torch.tensor([0, 3])[:, None]
    wanted = call(change(inputs, lambda x: x.to(F64)), key_mask=mask, **options)
    state = started(inputs, mask, 11, options)
    assert state.table.dtype == torch.bfloat16
    assert state.sums.dtype == torch.float32
    for t in range(11, 30):
        output, state = decode(inputs, t, state, options)
        assert output.dtype == torch.bfloat16
        assert (output.to(F64) - wanted[:, :, t : t + 1]).abs().amax() <= 2**-8 * wanted.abs().amax()


@pytest.mark.parametrize("units", ["row_max", "one"])
@torch.no_grad()
def test_logits_of_any_size_keep_both_parts_in_proportion(units):
    """Far below 0 the linear part is all there is in units of one, far above it is nothing."""
    options = ALL["chunks"] | {"units": units}
    for size in (300.0, -300.0, 1e-3):
        inputs = make(24, B=1, dtype=torch.float32)
        inputs["q"], inputs["k"] = inputs["q"].abs() * size, inputs["k"].abs()
        wanted = call(change(inputs, lambda x: x.to(F64)), **options)
        state = started(inputs, torch.ones(1, 24, dtype=torch.bool), 1, options)
        for t in range(1, 24):
            output, state = decode(inputs, t, state, options)
            assert_same(output.to(F64), wanted[:, :, t : t + 1], 1e-4)


def test_what_cannot_be_laid_out_stays_as_it_is():
    _, state = call(make(20), True, **ALL["cap"])
    assert begin(state, setting_of(ALL["cap_no_delay"]), 2) is None  # of another window
    assert begin(state, setting_of(ALL["chunks"]), 2) is None  # of no choice
    assert begin(state, setting_of(ALL["cap"]), 2) is not None
