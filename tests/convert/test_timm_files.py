"""A converted model of timm comes back as it was made, whatever arguments that took."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

timm = pytest.importorskip("timm")

from linattn.convert.convert import convert, plan_model  # noqa: E402
from linattn.convert.files import load_linearized, save_linearized  # noqa: E402

UNUSUAL = {"img_size": (64, 32), "in_chans": 1, "patch_size": 8, "global_pool": "avg", "reg_tokens": 2}
HEADLESS = {"num_classes": 0, "class_token": False, "global_pool": "max", "depth": 2, "qk_norm": True, "img_size": 48}


def build(layers=None, **arguments):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", **arguments).eval()
    convert(model, plan_model(model, "hedgehog", layers=layers))
    return model


def same(loaded, model):
    size = model.patch_embed.img_size
    images = torch.randn(1, model.patch_embed.proj.in_channels, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(loaded(images), model(images), rtol=0, atol=0)


def test_a_model_comes_back(tmp_path):
    model = build([0], num_classes=5)
    save_linearized(model, tmp_path)
    loaded = load_linearized(tmp_path)
    assert all(x.data_ptr() % 16 == 0 for x in loaded.parameters())  # else kernels for other places may round otherwise
    same(loaded, model)


@pytest.mark.parametrize("arguments", [UNUSUAL, HEADLESS], ids=["", "headless"])
def test_arguments_are_in_the_file(tmp_path, arguments):
    model = build(**arguments)
    save_linearized(model, tmp_path)
    same(load_linearized(tmp_path), model)


def test_what_was_changed_later_is_in_the_file(tmp_path):
    model = build(num_classes=5, drop_rate=0.25)
    model.reset_classifier(7, "avg")
    model.set_input_size(img_size=(96, 64))
    save_linearized(model, tmp_path)
    loaded = load_linearized(tmp_path)
    same(loaded, model)
    assert loaded.num_classes == 7
    assert loaded.head_drop.p == 0.25
    assert load_linearized(tmp_path, drop_rate=0.5).head_drop.p == 0.5  # what is given comes before what is in the file


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    model = build(act_layer=nn.ReLU)
    with pytest.raises(TypeError, match="cannot hold what the model was made with"):
        save_linearized(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_model_that_timm_did_not_make_is_refused(tmp_path):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=4)
    convert(model, plan_model(model, "hedgehog"))
    with pytest.raises(TypeError, match=r"nor made by timm\.create_model"):
        save_linearized(model, tmp_path)
