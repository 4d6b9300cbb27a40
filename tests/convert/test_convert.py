"""Conversion in place: which layers, which are kept, what is refused, and the package that can be called."""

import subprocess
import sys

import pytest
import torch
from tests.convert import causal
from tests.convert.causal import build, logits, padded
from tests.convert.tiny import Counted
from torch import nn

import linattn
from linattn.convert.convert import LinearizedAttention, convert, linearized_layers, plan_model
from linattn.convert.plan import LayerPlan, Plan


def test_window_layers_of_gemma_are_kept():
    model = build("Gemma3")
    kept, modules = model.state_dict(), dict(model.named_modules())
    stay = convert(model, plan_model(model, "still", window=4))
    assert list(stay) == [0]
    assert "window of 6" in stay[0]
    assert model.model.layers[0].self_attn is modules["model.layers.0.self_attn"]
    assert model.model.layers[1].self_attn.q_proj is modules["model.layers.1.self_attn.q_proj"]
    now = model.state_dict()
    assert all(torch.equal(now[name], weight) for name, weight in kept.items())
    new = [now[name].numel() for name in now.keys() - kept.keys()]
    # Maps of the query heads and of the key heads, and a weight for each query head.
    assert sum(new) == 2 * ((4 + 2) * 16 * 16 + 4)
    with pytest.raises(ValueError, match=r"layer 0 .* window of 6"):
        plan_model(build("Gemma3"), "still", layers=[0])


def test_some_layers_may_stay_exact():
    model, (ids, mask) = build(), padded(19, 12)
    wanted = logits(model, ids, mask)
    assert convert(model, plan_model(model, "still", layers=[1], window=19)) == {0: "not named in the plan"}
    assert sorted(linearized_layers(model)) == [1]
    torch.testing.assert_close(logits(model.double(), ids, mask), wanted, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_converted_leaves_the_model_as_it_was():
    with pytest.raises(ValueError, match=r"no layer of MistralForCausalLM .* window of 8"):
        plan_model(build("Mistral", sliding_window=8), "still")
    model = build()
    too_wide = LayerPlan("mechanism", mechanism="mirror", options={"cross_head": True})
    with pytest.raises(ValueError, match="cross_head"):
        convert(model, Plan("features", {0: LayerPlan("hybrid"), 1: too_wide}))
    assert not any(isinstance(module, LinearizedAttention) for module in model.modules())
    with pytest.raises(ValueError, match=r"names the layers \[7\]"):
        convert(model, Plan("still", {7: LayerPlan("hybrid")}))
    convert(model, plan_model(model, "still"))
    with pytest.raises(ValueError, match="converted already"):
        convert(model, plan_model(model, "still"))


def test_offloaded_weights_are_refused_before_anything_is_replaced():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(build(), "cpu")
    with pytest.raises(ValueError, match=r"layer 0 .* are offloaded, .* load the model"):
        convert(model, plan_model(model, "hedgehog"))
    assert not linearized_layers(model)


def test_the_function_is_named_without_an_import_of_its_packages():
    code = (
        "import sys, linattn; assert callable(linattn.linearize)\n"
        "assert not {'transformers', 'peft', 'timm', 'safetensors'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    with pytest.raises(ValueError, match="no adapter knows"):
        linattn.linearize(nn.Linear(2, 2), method="still")


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
