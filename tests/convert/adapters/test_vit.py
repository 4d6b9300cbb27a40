"""ViT of transformers."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.convert.adapters import families

from linattn.convert.plan import LayerShape

IMAGES = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def call(model):
    return model(pixel_values=IMAGES).logits


@pytest.fixture(scope="module")
def model():
    return families.build("ViTForImageClassification", intermediate_size=48, image_size=16, patch_size=4, num_labels=7)


def test_sites(model):
    names = [f"vit.layers.{i}.attention" for i in range(2)]
    families.check_parts(model, names, LayerShape(4, 4, 8, 32, causal=False))


def test_teacher_mode_is_the_model(model):
    families.check_teacher(model, call)


def test_features_change_the_attention_and_no_weight(model):
    families.check_features(model, call)


def test_zeros_softmax_starts_without_loss(model):
    families.check_lossless_start(model, call)
