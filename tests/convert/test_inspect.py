import pytest
import torch
from tests.convert.evaluate.tiny import tiny_llama

import linattn.convert.inspect as fit
from linattn.convert.convert import Observation
from linattn.convert.inspect import InspectOptions, Statistics, choose, inspect
from linattn.convert.plan import LayerShape
from linattn.support.options import OptionError


def batches(step):
    return {"input_ids": torch.randint(256, (2, 48), generator=torch.Generator().manual_seed(step))}


def attention_by_hand(model, ids):
    """The weights of transformers' own eager attention: (layers, H, T, T)."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(model(ids, output_attentions=True).attentions)[:, 0].double()


def test_figures_are_those_of_the_models_own_attention():
    held_out, told = [{"input_ids": batches(9)["input_ids"][:1]}], []
    options = InspectOptions(window=8, steps=2, points=32)
    rows = inspect(tiny_llama(), batches, held_out, options, progress=lambda *words: told.append(words[:2]))
    assert told == [(1, 3), (2, 3), (3, 3)]
    weights = attention_by_hand(tiny_llama(), held_out[0]["input_ids"])
    places = torch.arange(48)
    distant = (places[:, None] - places) >= 8
    exact = {
        "entropy": torch.special.entr(weights).sum(-1).mean(-1),
        "far": (weights * (distant & (places >= 4))).sum(-1).mean(-1),
        "sinks": (weights * (distant & (places < 4))).sum(-1).mean(-1),
    }
    assert [row["layer"] for row in rows] == [0, 1]
    for i, row in enumerate(rows):
        for name, values in exact.items():
            assert (torch.tensor(row[name]) - values[i]).abs().max() < 1e-5
        assert abs(row["even_entropy"] - float((places + 1).double().log().mean())) < 1e-6
        assert len(row["k_norm"]) == len(row["degrees_of_freedom"]) == 2
        fits = {each["name"]: each for each in row["fits"]}
        assert row["choice"] == choose(row["fits"])["name"]
        assert 0 < fits["window"]["missed"] < 1
        # Key heads, two windows, channels of keys and values, a score and a mark; and the length.
        assert fits["window"]["state"] == 2 * 16 * (2 * 8 + 2) + 1
        # One of the 8 tokens of a chunk, 4 of the first; with a position besides.
        assert fits["window+salient"]["state"] == fits["window"]["state"] + 2 * (4096 // 8 - 2 + 3) * (2 * 8 + 3)
    assert sum(row["dimension"] for row in rows) == 2 * 8


def test_a_window_is_for_causal_layers():
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, hidden=32, causal=False)
    made = fit.make_cores(shape, None, 8, torch.device("cpu"))
    assert set(made) == {"hedgehog", "t2r", "elu", "mirror"}
    assert fit.state_numbers(made["elu"]) > 0
    with pytest.raises(OptionError, match="window has a window of past tokens"):
        fit.make_cores(shape, ("window",), 8, torch.device("cpu"))


def test_training_helps_and_leaves_the_model_alone():
    model = tiny_llama(num_hidden_layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    missed = {}
    for steps in (0, 12):
        options = InspectOptions(steps=steps, lr=3e-2, candidates=("hedgehog",), points=16)
        missed[steps] = inspect(model, batches, [batches(50)], options)[0]["fits"][0]["missed"]
    assert missed[12] < 0.9 * missed[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_norms_over_real_tokens():
    torch.manual_seed(0)
    shape = LayerShape(num_heads=2, num_kv_heads=1, head_dim=4, hidden=8, causal=False)
    q, k = torch.randn(2, 2, 10, 4), torch.randn(2, 1, 10, 4)
    mask = torch.arange(10) < torch.tensor([[10], [6]])
    k[1, :, 6:] = float("nan")  # padding may hold anything
    statistics = Statistics(shape, InspectOptions(window=3, points=8))
    statistics.add(Observation(0, q, k, k, torch.zeros(2, 10, 8), mask, q))
    figures = statistics.figures(2**-8)
    norms = torch.cat([k[0, 0], k[1, 0, :6]]).double().norm(dim=-1)
    assert abs(figures["k_norm"][0] - float(norms.mean())) < 1e-6
    assert all(x == x for name in ("entropy", "far", "degrees_of_freedom") for x in figures[name])
