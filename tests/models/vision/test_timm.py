"""The backbones in timm: its registry, its contract, its features, its data and optimiser."""

import sys

import pytest
import torch
from tests.models.vision.cases import images

timm = pytest.importorskip("timm")

from linattn.models.vision import timm_models  # noqa: E402
from linattn.models.vision.timm_models import TIMM_MODELS, register_timm_models  # noqa: E402

KINDS = ["linattn_nalaformer_xtiny", "linattn_polaformer_pvt_tiny", "linattn_polaformer_swin_tiny", "linattn_qtvit_1"]


def shallow(name, **options):
    depths = (1,) * (5 if "qtvit" in name else 4)
    torch.manual_seed(0)
    return timm.create_model(name, depths=depths, img_size=64, **options)


def test_names():
    names = timm.list_models("linattn_*")
    assert set(names) == set(TIMM_MODELS)
    expected = {"linattn_nalaformer_xtiny", "linattn_nalaformer_large_linear", "linattn_polaformerpp_b5",
                "linattn_rala_small", "linattn_mirrorla_tiny", "linattn_polaformer_pvt_medium",
                "linattn_polaformer_swin_base", "linattn_qtvit_6"}  # fmt: skip
    assert expected <= set(names)
    assert all(hasattr(timm_models, name) for name in timm_models.__all__)
    register_timm_models()  # a second time: nothing happens
    assert set(timm.list_models("linattn_*")) == set(names)


def test_classes_and_mechanisms_by_option():
    model = timm.create_model("linattn_nalaformer_tiny", num_classes=10)
    assert model(images()).shape == (2, 10)
    model = shallow("linattn_nalaformer_xtiny", mechanism="mirror", in_chans=1)
    assert model.stages[0].blocks[0].attn.mechanism.info.name == "mirror"
    assert model(images()[:, :1]).shape == (2, 1000)
    linear = shallow("linattn_rala_tiny_linear")
    assert [stage.blocks[0].attn.mechanism.info.name for stage in linear.stages] == ["rala"] * 4
    with pytest.raises(TypeError, match="unexpected keyword argument 'mechanizm'"):
        timm.create_model("linattn_rala_tiny", mechanizm="elu")
    with pytest.raises(RuntimeError, match="pretrained"):
        timm.create_model("linattn_nalaformer_xtiny", pretrained=True)


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_configuration_names_what_is_there(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert model.default_cfg is model.pretrained_cfg
    assert model.default_cfg["architecture"] == name
    assert model.default_cfg["num_classes"] == model.num_classes == 1000
    weights = dict(model.named_parameters())
    assert weights[model.default_cfg["classifier"] + ".weight"].shape == (1000, model.head_hidden_size)
    assert weights[model.default_cfg["first_conv"] + ".weight"].shape[1] == 3
    head = model.default_cfg["classifier"]
    assert list(weights)[-2:] == [f"{head}.weight", f"{head}.bias"]  # where timm looks for the classifier
    planes = model.forward_features(torch.empty(1, 3, 224, 224, device="meta")) if name in KINDS else None
    assert planes is None or planes.shape[2:] == model.default_cfg["pool_size"]
    assert model.no_weight_decay() <= set(weights)


@pytest.mark.parametrize("name", KINDS)
def test_ways_to_features_agree(name):
    whole = shallow(name).eval()
    wanted = whole.forward_intermediates(images(), intermediates_only=True)
    for options in ({}, {"feature_cls": "getter"}, {"feature_cls": "hook"}):
        model = shallow(name, features_only=True, out_indices=(1, 3), **options).eval()
        assert model.feature_info.reduction() == [8, 32]
        for mine, theirs in zip(model(images()), (wanted[1], wanted[3]), strict=True):
            torch.testing.assert_close(mine, theirs)
    early = whole.forward_intermediates(images(), indices=[0, -3], stop_early=True, intermediates_only=True)
    assert [plane.shape for plane in early] == [wanted[0].shape, wanted[1].shape]
    last, _ = whole.forward_intermediates(images(), indices=[1], stop_early=True)
    torch.testing.assert_close(last, wanted[1])
    normed = whole.forward_intermediates(images(), indices=1, norm=True, intermediates_only=True)
    torch.testing.assert_close(normed[0], whole.forward_features(images()))
    assert whole.prune_intermediate_layers([0, 2]) == [0, 2]
    assert len(whole.stages) == 3
    torch.testing.assert_close(whole(images()), wanted[2])


@pytest.mark.parametrize("name", KINDS)
def test_layers_in_order(name):
    """Stem first, then block by block, the classifier last and alone with what stands around it."""
    from timm.models import group_parameters

    with torch.device("meta"):
        model = timm.create_model(name)
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse), reverse=False)
        assert all(n.startswith("stem") for n in groups[0])
        last = groups[max(groups)]
        assert all(n.startswith(("head", "norm")) for n in last)
        assert {n for names in groups.values() for n in names} == {n for n, _ in model.named_parameters()}
        if coarse:
            assert len(groups) == 6
        else:
            assert len(groups) == 2 + sum(len(stage.blocks) for stage in model.stages)
        of = {n: i for i, names in groups.items() for n in names}
        for name, layer in of.items():  # what steps down goes with the first block after it, the last norm before it
            if ".downsample." in name:
                first = name.split(".downsample")[0] + ".blocks.0."
                assert {of[n] for n in of if n.startswith(first)} == {layer}


def test_optimizer_spares_what_is_no_weight():
    from timm.optim import create_optimizer_v2

    model = shallow("linattn_polaformer_swin_tiny")
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    for name in ("stages.0.blocks.0.attn.mechanism.power", "stages.0.blocks.0.attn.key_position.weight",
                 "stages.2.blocks.0.attn.relative_position_bias", "norm.weight"):  # fmt: skip
        assert decay[id(named[name])] == 0, name
    assert decay[id(named["stages.0.blocks.0.attn.qkv.weight"])] == 0.05
    assert scale[id(named["stem.embed.proj.weight"])] < scale[id(named["stages.3.blocks.0.mlp.fc1.weight"])] < 1
    assert scale[id(named["head.fc.weight"])] == 1


def test_missing_timm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.models", None)
    with pytest.raises(ImportError, match=r"pip install 'linattn\[vision\]'"):
        register_timm_models()
