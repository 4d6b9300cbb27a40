"""Presets are the blocks of the papers."""

import pytest
import torch

from linattn.layers import list_presets, preset
from linattn.models.vision import create_vit


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_learns_in_a_host(name):
    torch.manual_seed(0)
    model = create_vit("digits", preset=name, patch_size=2, depth=1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    assert model.blocks[0].attn.mechanism.info.name == preset(name).mechanism
    out = model(torch.randn(2, 1, 8, 8, dtype=torch.float64))
    (out * torch.randn_like(out)).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_parts_around_another_mechanism():
    model = create_vit("digits", "elu", preset="nala", attention={"gate": "linear"}, cpe=0)
    attention = model.blocks[0].attn
    assert attention.mechanism.info.name == "elu"
    assert (attention.options.gate, attention.options.norm) == ("linear", "layer")
    assert model.blocks[0].cpe1 is None
    assert model.blocks[0].mlp.conv is not None


def test_unknown_preset():
    with pytest.raises(ValueError, match="preset must be one of 'agent', 'flatten'"):
        preset("swin")
