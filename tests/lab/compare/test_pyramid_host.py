"""Comparisons in a pyramid: its planes on small images, equal starts, and one end to end."""

import json
from dataclasses import replace

import pytest
import torch

from linattn.lab.compare.images import CompareImages
from linattn.lab.train.host import VisionHost
from linattn.mechanisms.base import Mechanism
from linattn.models.vision.pyramid import PYRAMID_SIZES

HOST = VisionHost(host="pyramid", size="xt")
SMALL = {"embed_dims": (8, 8, 16, 16), "depths": (2, 1, 1, 1), "num_heads": (1, 1, 2, 2), "head_width": 16}


@pytest.fixture
def small(monkeypatch, few_images):
    monkeypatch.setitem(PYRAMID_SIZES, "xt", SMALL)
    return few_images


@pytest.mark.parametrize(("pixels", "stride"), [(224, 4), (64, 4), (32, 2), (28, 2), (16, 1), (8, 1)])
def test_small_images_keep_a_plane_in_the_last_stage(pixels, stride):
    assert HOST.stem_stride((pixels, pixels)) == stride
    assert replace(HOST, patch_size=4).stem_stride((pixels, pixels)) == 4, "as asked for"


def test_stages_have_the_mechanisms_and_planes_that_are_told(small):
    for stages, names in (("", ["pola"] * 3 + ["softmax"] * 2), ("llll", ["pola"] * 5)):
        host = replace(HOST, stages=stages)
        model = host.create("pola", small, 0)
        assert [part.info.name for part in model.modules() if isinstance(part, Mechanism)] == names
        told = host.describe_model(model, small.image_size)
        planes = model.forward_intermediates(torch.zeros(2, 1, *small.image_size), intermediates_only=True)
        assert told["tokens"] == [plane.shape[2] * plane.shape[3] for plane in planes] == [64, 16, 4, 1]
        assert told["width"] == [plane.shape[1] for plane in planes]
        assert told["depth"] == [2, 1, 1, 1]


def test_what_mechanisms_do_not_own_starts_the_same_in_a_pyramid(small):
    host = replace(HOST, stages="llll")
    plain, again, other = (dict(host.create("relu", small, s).named_parameters()) for s in (3, 3, 4))
    for mechanism in ("softmax", "mirror", "pola"):
        torch.manual_seed(len(mechanism))  # whatever ran before
        found = dict(host.create(mechanism, small, 3).named_parameters())
        assert {name for name in found if ".mechanism." not in name} == set(plain)
        assert all(torch.equal(parameter, found[name]) for name, parameter in plain.items())
    drawn = [name for name in plain if plain[name].std() > 0]
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert not any(torch.equal(plain[name], other[name]) for name in drawn)


def test_a_comparison_in_a_pyramid(small, tmp_path, compared):
    config = CompareImages(
        mechanisms=("softmax", "mirror"), host="pyramid", size="xt", seeds=1, lr=(3e-3,), epochs=1, batch_size=32,
        warmup_epochs=1, device="cpu", jobs=1, output=tmp_path,
    )  # fmt: skip
    code, results, found = compared(config)
    assert code == 0
    assert "pyramid xt of stages llss at 64, 16, 4, 1 tokens" in results["meta"]["about"]
    assert results["meta"]["host"]["tokens"] == [64, 16, 4, 1]
    assert len(found["attention"]["mirror", 0]["layers"]) == 5
    costs = found["cost"]
    assert costs["mirror", 0]["mechanism_parameters"] > costs["softmax", 0]["mechanism_parameters"] == 0
    examples = json.loads((tmp_path / "examples.json").read_text())
    assert examples["layer"] == "stages.0.blocks.1.attn", "the finest plane"
    heat = torch.tensor(examples["images"][0]["maps"]["softmax"])
    assert heat.shape == (8, 8)
    assert heat.sum().item() == pytest.approx(1, abs=1e-2)
