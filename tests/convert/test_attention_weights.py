"""A converted model has no attention weights: who asks for them is told so, in whatever way it is asked."""

import pytest
import torch
from tests.convert import causal
from tests.convert.tiny import Counted

import linattn
from linattn.convert.convert import convert, linearized_layers, plan_model

IDS = torch.arange(3, 12)[None]
WORDS = "output_attentions=True is not possible: a converted layer never has its weights"


def test_models_say_so_also_where_some_layers_are_exact():
    model = causal.build("Gemma3")
    convert(model, plan_model(model, "lolcats", layers=[1], window=4))
    with pytest.raises(ValueError, match=WORDS):
        model(IDS, output_attentions=True)
    with pytest.raises(ValueError, match=WORDS):
        model.generate(IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2, do_sample=False)
    assert model(IDS, output_attentions=False).logits.shape == (1, 9, 48)


def test_a_config_that_asks_for_them_is_not_converted():
    model = causal.build(output_attentions=True)
    chosen = plan_model(model, "lolcats", window=4)
    with pytest.raises(ValueError, match=r"set model\.config\.output_attentions = False"):
        convert(model, chosen)
    batches = Counted()
    with pytest.raises(ValueError, match=r"set model\.config\.output_attentions = False"):
        linattn.linearize(model, method="dof", batches=batches)
    assert not batches.asked  # nothing was measured before
    assert not linearized_layers(model)
    model.config.output_attentions = False
    convert(model, chosen)
    with pytest.raises(ValueError, match="not supported"):  # transformers' own words
        model.config.output_attentions = True
