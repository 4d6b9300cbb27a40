"""Hybrid attention says what is wrong with a call, and which form takes a right one."""

import pytest
import torch

from linattn.ops.hybrid.api import hybrid_attention_step
from linattn.ops.hybrid.types import SalientBudget
from ops.hybrid_cases import SETTINGS, call, make

BUDGET = SalientBudget(1 / 4, 4)
WRONG = {
    "window": ({"window": -1}, "window"),
    "layout": ({"layout": "blocks"}, "layout must be one of 'sliding', 'chunks'"),
    "units": ({"units": "two"}, "units"),
    "scale": ({"scale": 0.0}, "scale"),
    "eps": ({"eps": -1.0}, "eps"),
    "features": ({"features": torch.ones(2, 4, 6, 3)}, "features must be a pair"),
    "feature heads": ({"features": (torch.ones(2, 4, 6, 3), torch.ones(2, 4, 6, 3))}, r"features\[1\]"),
    "gate": ({"gate": torch.ones(2, 4, 6, 1)}, "gate"),
    "scores alone": ({"scores": torch.ones(2, 2, 6)}, "scores need a budget"),
    "NaN scores": ({"scores": torch.full((2, 2, 6), torch.nan), "budget": BUDGET, "window": 4}, "NaN"),
    "chunk": ({"budget": BUDGET, "window": 3, "layout": "chunks"}, "budget.chunk"),
    "short window": ({"budget": BUDGET, "window": 3}, "budget.chunk"),
    "budget": ({"budget": 4, "window": 4}, "SalientBudget"),
    "state": ({"state": 3}, "HybridState"),
    "ring": ({"state": 4, "window": 5}, "initial_state.window.k"),
    "no budget": ({"state": 4, **SETTINGS["ratio"]}, "budget must be that of the calls before"),
    "cap": ({"state": 4, **SETTINGS["cap"], "budget": SalientBudget(1 / 4, 4, cap=9)}, "initial_state.salient"),
    "impl": ({"impl": "triton", "window": 4, "layout": "chunks"}, "cannot serve this call"),
    "packed": ({"cu_seqlens": torch.tensor([0, 6])}, "batch size must be 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused(name):
    options, words = WRONG[name]
    inputs = make(6, dtype=torch.float32)
    options = dict(options)
    with_state = "state" in options
    if with_state and options.pop("state") == 4:
        options["initial_state"] = call(inputs, True, **SETTINGS["cap" if name == "cap" else "chunks"]).state
    elif with_state:
        options["initial_state"] = 3
    if "features" in options:
        inputs["features"] = options.pop("features")
    with pytest.raises((TypeError, ValueError), match=words):
        call(inputs, with_state, **options)


def test_wrong_budgets_and_steps_are_refused():
    for wrong in ({"ratio": 2.0}, {"chunk": 0}, {"cap": 1, "sinks": 2}, {"sinks": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SalientBudget(**wrong)
    x = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match="scores"):
        hybrid_attention_step(x, x, x, None, scores=torch.ones(1, 2), budget=None)
    with pytest.raises(TypeError, match="windoww"):
        hybrid_attention_step(x, x, x, None, windoww=3)
