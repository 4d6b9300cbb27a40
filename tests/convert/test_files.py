"""Saved and loaded, a converted model is the same one; what does not fit is an error, never a fresh start."""

import json
import os

import pytest
import torch
from tests.convert.causal import build, converted, logits, padded
from torch.testing import assert_close
from transformers import ViTConfig, ViTForImageClassification

from linattn.convert.files import load_linearized, save_linearized

STILL = {"window": 4, "ratio": 1 / 4, "sinks": 1}
GATED = {"gate": True, "units": "row_max", "score": "kl", "reduce": "max"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, folder = converted("still", "Gemma3", **GATED, **STILL).float(), tmp_path_factory.mktemp("saved") / "model"
    save_linearized(model, folder)
    return model, folder


@pytest.fixture
def copied(saved, tmp_path):
    for file in saved[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def same(one, other):
    weights, others = one.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert all(
        torch.equal(weights[name], others[name]) and weights[name].dtype == others[name].dtype for name in weights
    )
    ids, mask = padded(19, 12)
    assert_close(logits(one, ids, mask), logits(other, ids, mask), rtol=0, atol=0)


def test_a_loaded_model_is_the_saved_one(saved):
    model, folder = saved
    same(load_linearized(folder), model)
    assert json.loads((folder / "config.json").read_text())["linearize"] == model.config.linearize
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # no temporary folder is left


def test_save_pretrained_in_pieces_writes_the_same_format(saved, tmp_path, monkeypatch):
    model, _ = saved
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    same(load_linearized(tmp_path), model)
    (tmp_path / "tokenizer.json").write_text("{}")
    written, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda new, own: written.append(own.name) or replace(new, own))
    save_linearized(model, tmp_path)  # one file in the place of many; what is not the model's stays
    assert written[-1] == "config.json"
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert (tmp_path / "tokenizer.json").exists()
    same(load_linearized(tmp_path), model)


def test_a_bf16_model_comes_back_with_cores_in_fp32(tmp_path):
    model = converted("lolcats", window=4).float()
    for name, parameter in model.named_parameters():  # as from_pretrained does it: the rotary frequencies stay fp32
        parameter.data = parameter.data.to(torch.float32 if ".core." in name else torch.bfloat16)
    save_linearized(model, tmp_path)
    loaded = load_linearized(tmp_path)
    assert loaded.dtype == torch.bfloat16
    same(loaded, model)


def test_a_family_whose_files_have_other_names_than_its_modules_comes_back(tmp_path):
    """transformers writes a ViT's `layers.0.attention.q_proj` as `encoder.layer.0.attention.attention.query`."""
    from linattn.convert.convert import convert, plan_model

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes)).eval()
    convert(model, plan_model(model, "hedgehog"))
    for layer, parameter in enumerate(p for name, p in model.named_parameters() if ".core." in name):
        parameter.data += layer  # no two are alike
    pictures = torch.randn(2, 3, 8, 8)
    save_linearized(model, tmp_path)
    loaded = load_linearized(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert_close(loaded(pictures).logits, model(pictures).logits, rtol=0, atol=0)
    model.save_pretrained(tmp_path, save_original_format=False)
    with torch.no_grad():
        assert_close(load_linearized(tmp_path)(pictures).logits, model(pictures).logits, rtol=0, atol=0)


def test_weights_that_do_not_fit_are_refused(copied):
    from safetensors.torch import load_file, save_file

    file = copied / "model.safetensors"
    weights = load_file(file)
    core = next(name for name in weights if ".core." in name)
    plain = next(name for name in weights if ".core." not in name and "layers.2" in name)
    for change, message in (
        ({name: x for name, x in weights.items() if name != core}, "do not fit its plan: .*core"),
        ({name: x for name, x in weights.items() if name != plain}, "lacks weights"),
        (weights | {"model.more": torch.ones(1)}, "no place for: model.more"),
        (weights | {plain: weights[plain][..., :1].clone()}, "size|mismatch|lacks weights"),
    ):
        save_file(change, file, {"format": "pt"})
        with pytest.raises((ValueError, RuntimeError), match=message):
            load_linearized(copied)


def test_folders_of_something_else_are_refused(tmp_path):
    model = build()
    with pytest.raises(ValueError, match="no converted layer"):
        save_linearized(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_linearized(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not converted"):
        load_linearized(tmp_path)
