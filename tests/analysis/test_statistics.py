"""A whole model in numbers, and the heat map of a token."""

import json

import pytest
import torch

from linattn.analysis import statistics
from linattn.analysis.attention_map import attention_map
from linattn.analysis.capture import capture
from linattn.analysis.entropy import effective_rank, entropy
from linattn.analysis.statistics import model_statistics, token_heat_map
from linattn.analysis.truncation import energy_lost
from linattn.models.vision import create_vit


def vit(mechanism: str, **options):
    torch.manual_seed(0)
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 2} | options
    model = create_vit("digits", mechanism, **options).double()
    for block in model.blocks:  # far enough from where it starts for the heads to differ
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.15)
    return model


IMAGES = torch.randn(5, 1, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("mechanism", ["softmax", "mirror", "gated", "inline"])
def test_numbers_are_those_of_the_maps_however_they_are_cut(mechanism, monkeypatch):
    model = vit(mechanism)
    whole = model_statistics(model, IMAGES)
    for layer, call in zip(whole, capture(model, IMAGES), strict=True):
        weights = attention_map(call.mechanism, call.q, call.k, **call.map_arguments())
        assert layer.layer == call.name
        assert layer.entropy == pytest.approx(entropy(weights).mean((0, 2)).tolist())
        assert layer.effective_rank == pytest.approx(effective_rank(weights).mean(0).tolist())
        assert layer.energy_lost == pytest.approx(energy_lost(call.mechanism, call.q, call.k))
        negative = bool((weights < 0).any())
        assert (layer.positive_sequence_entropy != pytest.approx(layer.entropy, abs=1e-9)) == negative
        assert len(layer.opposed_kept) == 2
    monkeypatch.setattr(statistics, "IMAGES", 2)
    monkeypatch.setattr(statistics, "MAP_NUMBERS", 1)
    for cut, layer in zip(model_statistics(model, IMAGES), whole, strict=True):
        for name in ("entropy", "entropy_norm_correlation", "effective_rank", "energy_lost"):
            assert getattr(cut, name) == pytest.approx(getattr(layer, name), abs=1e-9)


def test_softmax_correlates_relu_loses_and_json_takes_it():
    softmax, relu = (model_statistics(vit(name), IMAGES) for name in ("softmax", "relu"))
    assert max(softmax[0].entropy_norm_correlation) < -0.2
    assert all(0.2 < share < 0.8 for share in relu[0].energy_lost)
    assert (softmax[0].opposed_kept, relu[0].opposed_kept) == ([1.0, 1.0], [0.0, 0.0])
    (normed, _) = model_statistics(vit("relu", attention={"qk_norm": "rms"}), IMAGES)
    assert normed.entropy_norm_correlation == [None, None]
    assert json.loads(json.dumps(normed.as_dict())) == normed.as_dict()


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("mechanism", ["softmax", "pola", "agent"])
def test_heat_map_is_a_row_on_the_plane(mechanism, pool):
    model = vit(mechanism, global_pool=pool)
    image = IMAGES[0]
    calls = capture(model, image[None])
    prefix = int(pool == "token")
    weights = attention_map(calls[-1].mechanism, calls[-1].q, calls[-1].k, **calls[-1].map_arguments())[0]
    centre = 2 * 6 + 3  # of 4 x 6 patches
    heat = token_heat_map(model, image)
    assert heat.shape == (4, 6)
    torch.testing.assert_close(heat.flatten(), weights[:, prefix + centre, prefix:].mean(0))
    one = token_heat_map(model, image[None], layer="blocks.1.attn", token=7, head=1)
    torch.testing.assert_close(one.flatten(), weights[1, prefix + 7, prefix:])
    other = token_heat_map(model, image, layer=0)
    assert (other - heat).abs().amax() > 1e-6


def test_wrong_places():
    for options, message in (
        ({"layer": 2}, "layer must be one of blocks.0.attn, blocks.1.attn or a number from -2 to 1, got 2"),
        ({"layer": "head"}, "layer must be one of blocks.0.attn"),
        ({"token": 24}, "token must be an integer from 0 to 23, got 24"),
        ({"head": 2}, "head must be an integer from 0 to 1, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            token_heat_map(vit("relu"), IMAGES[0], **options)
    with pytest.raises(ValueError, match=r"image must be one image \(C, height, width\), got shape \(5, 1, 8, 12\)"):
        token_heat_map(vit("relu"), IMAGES)
    with pytest.raises(ValueError, match="images must hold at least one image"):
        model_statistics(vit("relu"), IMAGES[:0])
