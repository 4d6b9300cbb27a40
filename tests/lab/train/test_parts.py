"""Optimiser groups, weight averages, loss, meter, compiled blocks: each against a plain way to say the same."""

import math

import pytest
import torch
from torch import nn

from linattn.lab.train.accelerator import create_optimizer, split_by_decay
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import WeightAverage, sums_of, training_loss
from linattn.lab.train.rounds import read
from linattn.lab.train.text.config import TextConfig
from linattn.layers import Attention
from linattn.models.vision import create_vit
from linattn.support.compiling import compile_blocks
from linattn.support.options import OptionError


def test_only_weight_matrices_are_decayed():
    """Spelled out for one block; angles and the like have two axes and stay free all the same."""
    decayed, free = split_by_decay(create_vit("digits", "mirror", depth=1))
    assert set(decayed) == {
        "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "head.weight",
    }  # fmt: skip
    mechanism = {name.rsplit(".", 1)[1] for name in free if ".mechanism." in name}
    assert mechanism == {"angles", "normals", "amplitude", "gain", "bias"}
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= set(free)


def test_linear_maps_inside_a_mechanism_are_decayed():
    attention = Attention(8, 2, "gated")
    decayed, free = split_by_decay(attention)
    inside = [name for name, module in attention.named_modules() if isinstance(module, nn.Linear) and "mech" in name]
    assert inside, "gated has a linear map"
    assert {f"{name}.weight" for name in inside} <= set(decayed)
    assert {f"{name}.bias" for name in inside} & set(dict(attention.named_parameters())) <= set(free)


def test_groups_hold_each_trained_parameter_once():
    model = create_vit("digits", "pola", depth=1)
    model.head.weight.requires_grad_(False)
    optimizer = create_optimizer(model, TrainConfig(weight_decay=0.3, lr=0.1, betas=(0.8, 0.9)))
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert (decayed["lr"], decayed["betas"]) == (0.1, (0.8, 0.9))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("config", "eps"), [(TrainConfig(), 1e-8), (TextConfig(), 1e-8), (TextConfig(eps=1e-6), 1e-6)])
def test_a_config_may_say_what_is_added_to_the_denominator(config, eps):
    assert {group["eps"] for group in create_optimizer(nn.Linear(2, 2), config).param_groups} == {eps}


def test_the_average_is_the_explicit_sum():
    """``a_n = d^n w_0 + (1 - d) sum_i d^(n-i) w_i``, in fp64; own weights come back to the last bit."""
    torch.manual_seed(0)
    model, decay, steps = nn.Linear(3, 2).double(), 0.8, 7
    average = WeightAverage(model, decay)
    weights = [model.weight.detach().clone()]
    for _ in range(steps):
        with torch.no_grad():
            model.weight.copy_(torch.randn_like(model.weight))
        average.update()
        weights.append(model.weight.detach().clone())
    expected = decay**steps * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        expected = expected + (1 - decay) * decay ** (steps - i) * weight
    average.swap()
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-12)
    average.swap()
    assert torch.equal(model.weight, weights[-1])


def test_label_smoothing_is_its_formula():
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 3, 3, 1])
    shares = torch.full((4, 5), 0.2 / 5, dtype=torch.float64)
    shares[torch.arange(4), targets] += 0.8
    expected = -(shares * (logits - logits.exp().sum(1, keepdim=True).log())).sum() / 4
    torch.testing.assert_close(training_loss(logits, targets, 0.2), expected, rtol=0, atol=1e-12)
    # shares come smoothed already: once more would be twice
    torch.testing.assert_close(training_loss(logits, shares, 0.2), expected, rtol=0, atol=1e-12)


def test_low_precision_logits_give_an_fp32_loss():
    logits = torch.tensor([[100.0, 101.0]], dtype=torch.bfloat16)
    loss = training_loss(logits, torch.tensor([0]), 0.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(float(logits[0, 1] - logits[0, 0]))), rel=1e-6)


def test_batches_are_weighed_by_their_size():
    sums = sums_of(torch.tensor(1.0), torch.eye(3), torch.tensor([0, 1, 0]))  # two of three
    sums = sums + sums_of(torch.tensor(5.0), torch.eye(2), torch.tensor([[0.9, 0.1], [0.6, 0.4]]))  # one of two, shares
    assert read(sums) == pytest.approx(((3 * 1 + 2 * 5) / 5, 60.0))


def test_equal_blocks_are_compiled_once_and_names_stay():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = create_vit("digits", "relu", depth=4, patch_size=4)
    images, names = torch.randn(2, 1, 8, 8), list(model.state_dict())
    expected = model(images)
    compile_blocks(model, backend=backend)
    torch.testing.assert_close(model(images), expected)
    assert len(graphs) == 1
    assert list(model.state_dict()) == names


def test_a_model_without_blocks_is_not_compiled_in_silence():
    with pytest.raises(OptionError, match=r"compile.*Linear has none"):
        compile_blocks(nn.Linear(2, 2))
