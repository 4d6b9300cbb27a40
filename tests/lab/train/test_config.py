from dataclasses import fields, replace

import pytest

from linattn.lab.train.config import TrainConfig
from linattn.lab.train.recipes import RECIPES, deit, digits
from linattn.support.options import OptionError


def test_the_defaults_and_the_recipe_for_cpu_pass():
    TrainConfig().check()
    digits().check()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_make_sense_but_for_a_device_that_may_be_missing(name):
    config = RECIPES[name]()
    replace(config, device="cpu").check()
    assert config.warmup_epochs < config.epochs


def test_deit_is_the_published_recipe():
    config = deit()
    assert (config.epochs, config.warmup_epochs, config.weight_decay) == (300, 5, 0.05)
    assert config.lr == pytest.approx(5e-4 * config.batch_size / 512)
    assert (config.mixup, config.cutmix, config.erasing, config.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
    assert (config.rand_augment, config.clip_norm) == ("m9-mstd0.5-inc1", None)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("epochs", 0, "at least 1"),
        ("epochs", 2.5, "integer"),
        ("epochs", True, "integer"),
        ("batch_size", -3, "at least 1"),
        ("lr", 0.0, "above 0"),
        ("lr", NAN, "above 0"),
        ("lr", INF, "above 0"),
        ("lr", "fast", "number"),
        ("min_lr", -1e-9, "at least 0"),
        ("min_lr", 1.0, "lr = 0.001"),
        ("warmup_epochs", -1, "at least 0"),
        ("warmup_epochs", 31, "epochs = 30"),
        ("weight_decay", -0.1, "at least 0"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (0.9, 1.0), "below 1"),
        ("clip_norm", 0.0, "above 0"),
        ("label_smoothing", 1.0, "below 1"),
        ("ema_decay", 1.0, "below 1"),
        ("ema_decay", 0.0, "above 0"),
        ("mixup", -0.1, "at least 0"),
        ("cutmix", NAN, "at least 0"),
        ("rand_augment", "strong", "m9-n2"),
        ("erasing", 1.5, "at most 1"),
        ("crop_padding", -1, "at least 0"),
        ("precision", "fp8", "fp32, bf16"),
        ("seed", -1, "at least 0"),
        ("device", "tpu", "cpu, cuda"),
        ("device", "cuda:99", "cuda:99"),
        ("checkpoint_seconds", 0, "above 0"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(OptionError) as caught:
        replace(TrainConfig(), **{field: value}).check()
    assert caught.value.option == field
    assert allowed in caught.value.message


def test_the_fingerprint_has_every_field_that_can_move_a_weight():
    names = {field.name for field in fields(TrainConfig)}
    # CUDA graphs launch the same kernels: a run may go on with them or without
    assert names - set(TrainConfig().fingerprint()) == {"checkpoint_seconds", "graphs"}
    assert TrainConfig(device="cuda:1").fingerprint() == TrainConfig(device="cuda").fingerprint()
    assert TrainConfig(device="cuda").fingerprint() != TrainConfig(device="cpu").fingerprint()
