"""Comparisons in a pyramid: its planes on small images, equal starts, and one end to end."""

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from linattn.lab.compare import compare as main
from linattn.lab.compare import measure
from linattn.lab.compare.compare import compare
from linattn.lab.compare.host import create_host, describe_host, stem_stride
from linattn.lab.compare.settings import CompareConfig, HostConfig
from linattn.lab.tasks import load_images
from linattn.lab.train.config import TrainConfig
from linattn.mechanisms.base import Mechanism
from linattn.models.vision.pyramid import PYRAMID_SIZES
from linattn.support.options import OptionError

HOST = HostConfig("xt", family="pyramid")
SMALL = {"embed_dims": (8, 8, 16, 16), "depths": (2, 1, 1, 1), "num_heads": (1, 1, 2, 2), "head_width": 16}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(PYRAMID_SIZES, "xt", SMALL)
    return load_images("digits").subset(train=64, test=48, seed=0)


def mechanisms_of(model):
    return [module.info.name for module in model.modules() if isinstance(module, Mechanism)]


@pytest.mark.parametrize(("pixels", "stride"), [(224, 4), (64, 4), (32, 2), (28, 2), (16, 1), (8, 1)])
def test_small_images_keep_a_plane_in_the_last_stage(pixels, stride):
    assert stem_stride(HOST, (pixels, pixels)) == stride
    assert stem_stride(replace(HOST, patch_size=4), (pixels, pixels)) == 4, "as asked for"


def test_stages_have_the_mechanisms_and_planes_that_are_told(small):
    for stages, names in (("llss", ["pola"] * 3 + ["softmax"] * 2), ("llll", ["pola"] * 5)):
        model = create_host("pola", replace(HOST, stages=stages), small, 0)
        assert mechanisms_of(model) == names
        told = describe_host(model, small.image_size)
        planes = model.forward_intermediates(torch.zeros(2, 1, *small.image_size), intermediates_only=True)
        assert told["tokens"] == [plane.shape[2] * plane.shape[3] for plane in planes] == [64, 16, 4, 1]
        assert told["width"] == [plane.shape[1] for plane in planes]
        assert told["depth"] == [2, 1, 1, 1]


def test_what_mechanisms_do_not_own_starts_the_same_in_a_pyramid(small):
    host = replace(HOST, stages="llll")
    plain, again, other = (dict(create_host("relu", host, small, s).named_parameters()) for s in (3, 3, 4))
    for mechanism in ("softmax", "mirror", "pola"):
        torch.manual_seed(len(mechanism))  # whatever ran before
        own = dict(create_host(mechanism, host, small, 3).named_parameters())
        assert {name for name in own if ".mechanism." not in name} == set(plain)
        for name, parameter in plain.items():
            assert torch.equal(parameter, own[name]), name
    drawn = [name for name in plain if plain[name].std() > 0]
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert not any(torch.equal(plain[name], other[name]) for name in drawn)


def test_a_comparison_in_a_pyramid(small, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "load_images", lambda *_, **__: small)
    monkeypatch.setattr(measure, "throughput_in_turns", lambda models, *_, **__: dict.fromkeys(models, 1.0))
    train = TrainConfig(epochs=1, batch_size=32, lr=3e-3, warmup_epochs=1)
    config = CompareConfig("digits", ("softmax", "mirror"), HOST, train, 1, (), None, tmp_path / "c")
    screen = StringIO()
    assert compare(config, Console(file=screen, width=160)) == 0, screen.getvalue()
    assert "pyramid xt with stages llss at 64, 16, 4, 1 tokens" in screen.getvalue()
    results = json.loads((tmp_path / "c" / "results.json").read_text())
    assert results["meta"]["host"]["tokens"] == [64, 16, 4, 1]
    assert [row["status"] for row in results["rows"]] == ["done", "done"]
    softmax, mirror = results["mechanisms"]
    assert len(mirror["layers"]) == 5
    assert mirror["mechanism_parameters"] > softmax["mechanism_parameters"] == 0
    assert (tmp_path / "c" / "report.html").exists()
    examples = json.loads((tmp_path / "c" / "examples.json").read_text())
    assert examples["layer"] == "stages.0.blocks.1.attn", "the finest plane"
    heat = torch.tensor(examples["images"][0]["maps"]["softmax"])
    assert heat.shape == (8, 8)
    assert heat.sum().item() == pytest.approx(1, abs=1e-2)
    # other stages are another comparison; mechanisms may join
    with pytest.raises(OptionError, match="stages was llss, now llll"):
        compare(replace(config, host=replace(HOST, stages="llll")), Console(file=screen))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "nano"}, "size: must be one of xt"),
        ({"depth": 2}, "depth: is that of a vision transformer"),
        ({"stages": "ll"}, "stages: must be four letters"),
        ({"stages": "llxs"}, "stages: must be four letters"),
        ({"patch_size": 3}, "patch_size: must be one of"),
        ({"global_pool": "token"}, "global_pool: must be one of avg"),
        ({"family": "swin"}, "host: must be one of vit, pyramid"),
    ],
)
def test_wrong_options_of_a_pyramid_are_named(changes, words):
    with pytest.raises(OptionError, match=words):
        replace(HOST, **changes).check()


def test_folders_of_vision_transformers_stay_those_they_were():
    """Settings that were written before there were pyramids know nothing of them."""
    assert set(HostConfig().fingerprint()) == {"size", "patch_size", "depth", "global_pool", "preset", "local"}
    assert HOST.fingerprint()["stages"] == "llss"
