"""What mirrors cut off, as a loss: that of ``energy_loss`` by hand, in training alone, and felt by the weights."""

import pytest
import torch

from linattn.lab.tasks import load_images
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import EnergyLoss, train
from linattn.models.vision import create_vit
from linattn.support.compiling import compile_blocks

CPU = torch.device("cpu")


def build(mechanism="mirror"):
    torch.manual_seed(0)
    return create_vit("digits", mechanism, patch_size=4, depth=2)


def mirrors(model):
    return [block.attn.mechanism for block in model.blocks]


def by_hand(model, images):
    """Every mirror is asked anew for the queries and keys that it was given."""
    given = []
    hooks = [m.register_forward_pre_hook(lambda m, inputs: given.append((m, *inputs[:2]))) for m in mirrors(model)]
    model(images)
    for hook in hooks:
        hook.remove()
    return sum(mirror.energy_loss(q, k) for mirror, q, k in given) / len(given)


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_the_loss_of_the_mechanisms_by_hand(compiled):
    model, images = build(), torch.randn(3, 1, 8, 8)
    weight = model.blocks[0].attn.qkv.weight
    expected = by_hand(model, images)
    (gradient,) = torch.autograd.grad(expected, weight)
    energy = EnergyLoss(model)
    if compiled:
        compile_blocks(model, backend="eager")
    for _ in range(2):  # nothing is left of the pass before
        model(images)
        found = energy.take()
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, weight)[0], gradient)


def test_evaluation_leaves_nothing_behind():
    model, images = build(), torch.randn(3, 1, 8, 8)
    energy = EnergyLoss(model)
    with torch.no_grad():
        model(images)
    model.eval()(images)
    assert energy.take() == 0
    energy.remove()
    model.train()(images)
    assert energy.take() == 0


def test_its_weight_in_training_keeps_more_energy(tmp_path):
    data = load_images("digits").subset(train=96, test=64, seed=0)
    left = {}
    for weight in (0.0, 1.0):
        config = TrainConfig(epochs=3, batch_size=32, lr=1e-2, warmup_epochs=0, energy_loss=weight)
        model = build()
        train(model, create_batches(data, config, CPU), config, tmp_path / str(weight))
        assert not any(mirror._forward_pre_hooks for mirror in mirrors(model))
        left[weight] = by_hand(model, data.test.images[:32].float() / 255).item()
    assert left[1.0] < 0.9 * left[0.0]


def test_blocks_that_backward_runs_again_are_counted_once():
    losses = {}
    for checkpointing in (False, True):
        model = build()
        model.set_grad_checkpointing(checkpointing)
        energy, images = EnergyLoss(model), torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        losses[checkpointing] = []
        for _ in range(3):
            model(images)
            losses[checkpointing].append(energy.take())
            losses[checkpointing][-1].backward()
    torch.testing.assert_close(losses[True], losses[False])
