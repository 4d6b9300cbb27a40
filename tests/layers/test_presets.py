"""Presets are the blocks of the papers."""

import pytest
import torch

from linattn.layers import Attention, list_presets, preset
from linattn.models.vision import create_vit

EXPECTED = {
    "nala": {"local": "channel", "rotary": "blocks", "norm": "layer", "gate": "silu"},
    "pola": {"local": "shared", "gate": "linear", "key_position": (4, 4)},
    "pola_plus": {"local": "channel", "rotary": "features", "gate": "linear"},
    "rala": {"local": "channel", "rotary": "features", "gate": "linear"},
    "flatten": {"local": "shared", "key_position": (4, 4)},
    "vit": {},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_parts_of_a_paper(name):
    assert preset(name).attention_options((4, 4)) == EXPECTED[name]


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


def test_a_preset_does_not_change():
    before = dict(preset("nala").attention)
    preset("nala").attention_options((2, 2))["gate"] = None
    assert preset("nala").attention == before
    assert Attention(32, 2, "elu", **preset("nala").attention_options((2, 2))).options.gate == "silu"


def test_unknown_preset():
    with pytest.raises(ValueError, match="preset must be one of 'agent', 'flatten'"):
        preset("swin")
