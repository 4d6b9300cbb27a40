"""Options of training on images: recipes fill what is not given, and wrong values are named."""

from dataclasses import replace

import pytest
import torch

from linattn.lab.tasks import load
from linattn.lab.train import config as module
from linattn.lab.train.command import TrainImages
from linattn.lab.train.config import TrainConfig
from linattn.support import options
from linattn.support.options import OptionError


def test_deit_is_the_published_recipe():
    config = TrainConfig.parse({"recipe": "deit"})
    assert (config.epochs, config.warmup_epochs, config.weight_decay) == (300, 5, 0.05)
    assert config.lr == pytest.approx(5e-4 * config.batch_size / 512)
    assert (config.mixup, config.cutmix, config.erasing, config.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
    assert (config.rand_augment, config.clip_norm) == ("m9-mstd0.5-inc1", None)


@pytest.mark.parametrize(("name", "off"), [("clip_norm", "0"), ("ema_decay", "0.0"), ("rand_augment", "")])
def test_zero_turns_off_what_a_recipe_has(name, off):
    assert getattr(TrainConfig.parse({"recipe": "deit", name: off}), name) is None


def test_the_data_choose_recipe_and_size(tmp_path, monkeypatch):
    assert TrainImages.parse({}).recipe == TrainImages.parse({}).size == "digits"
    found = TrainImages.parse({"data": "fashion-mnist"})
    assert (found.recipe, found.size, found.epochs) == ("small_images", "nano", 20)
    assert TrainImages.parse({"host": "pyramid"}).size == "xt"
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        for number in range(3):
            (tmp_path / part / "a" / f"{number}.png").touch()
    assert TrainImages.parse({"data": str(tmp_path)}).recipe == "small_images"
    monkeypatch.setattr(module, "RESIDENT_BELOW", 6)
    found = TrainImages.parse({"data": str(tmp_path), "batch_size": "8"})
    assert (found.recipe, found.size, found.batch_size) == ("deit", "tiny", 8)
    assert load.RESIDENT_BELOW == 20_000


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"device": "cpu"}, ("fp32", False)),
        ({"device": "cuda:1"}, ("bf16", True)),
        ({"device": "cuda", "precision": "fp32", "compile": "no"}, ("fp32", False)),
        ({"device": "cpu", "precision": "bf16", "compile": "yes"}, ("bf16", True)),
    ],
)
def test_what_is_not_given_is_decided_by_the_device(given, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = TrainConfig.parse(given)
    assert (config.precision, config.compile) == found
    assert config.graphs is False


def test_a_warm_up_that_is_not_given_fits_into_the_epochs():
    assert TrainConfig.parse({"recipe": "deit", "epochs": "3"}).warmup_epochs == 3
    with pytest.raises(OptionError, match="epochs: must be an integer"):
        TrainConfig.parse({"epochs": "few"})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("epochs", 0, "at least 1"),
        ("lr", 0.0, "above 0"),
        ("min_lr", 1.0, "lr = 0.001"),
        ("warmup_epochs", 31, "epochs = 30"),
        ("clip_norm", 0.0, "above 0"),
        ("label_smoothing", 1.0, "below 1"),
        ("ema_decay", 0.0, "above 0"),
        ("rand_augment", "strong", "m9-n2"),
        ("erasing", 1.5, "at most 1"),
        ("precision", "fp8", "fp32, bf16"),
        ("graphs", 1, "true or false"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field, value, allowed):
    with pytest.raises(OptionError, match=f"{field}: .*{allowed}"):
        replace(TrainConfig(), **{field: value})


def test_a_device_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(options.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(OptionError, match="device: cuda:3 is not on this machine"):
        TrainConfig.parse({"device": "cuda:3"})
    with pytest.raises(OptionError, match="graphs: CUDA graphs need a GPU"):
        TrainConfig(graphs=True, device="cpu")
