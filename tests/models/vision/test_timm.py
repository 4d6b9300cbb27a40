"""The backbones in timm: what its own tests ask of a model, names, features, optimiser, train script."""

import sys

import pytest
import torch
from tests.models.vision.cases import images

timm = pytest.importorskip("timm")

from linattn.models.vision import timm_models  # noqa: E402
from linattn.models.vision.timm_models import TIMM_MODELS, register_timm_models  # noqa: E402

# One model of each kind; the others, which differ in widths and mechanisms, with the slow tests.
QUICK = ("linattn_nalaformer_xtiny", "linattn_mirrorla_xtiny_linear", "linattn_polaformer_pvt_tiny",
         "linattn_polaformer_swin_tiny", "linattn_qtvit_1", "linattn_deit_tiny_lion")  # fmt: skip
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TIMM_MODELS]


def shallow(name, **options):
    """One block a stage."""
    model = TIMM_MODELS[name]
    depth = {"depths": (1,) * model.num_depths} if model.pyramid else {"depth": 1}
    torch.manual_seed(0)
    return timm.create_model(name, **depth | {"img_size": 64, "drop_path_rate": 0.0} | options)


@pytest.mark.parametrize("name", EVERY)
def test_forward_and_head(name):
    model = shallow(name, num_classes=10).eval()
    with torch.no_grad():
        features = model.forward_features(images())
        assert features.shape[1 if TIMM_MODELS[name].pyramid else 2] == model.num_features
        before = model.forward_head(features, pre_logits=True)
        assert before.shape == (2, model.head_hidden_size)
        torch.testing.assert_close(model(images()), model.get_classifier()(before))
        model.reset_classifier(4)
        assert model(images()).shape == (2, 4)
        assert model.get_classifier().out_features == model.num_classes == 4
        model.reset_classifier(0)
        assert model.num_classes == 0
        torch.testing.assert_close(model(images()), before)
        model.reset_classifier(0, "")
        assert model(images()).shape == features.shape
        model.reset_classifier(3, "avg")
        assert model(images()).shape == (2, 3)
        assert shallow(name, num_classes=0, global_pool="")(images()).shape == features.shape
        assert shallow(name, in_chans=1)(images()[:, :1]).shape == (2, 1000)


@pytest.mark.parametrize("name", EVERY)
def test_features(name):
    """Strides 4, 8, 16, 32 of pyramids; of a plain transformer its last blocks, at the stride of its patches."""
    pyramid = TIMM_MODELS[name].pyramid
    model = shallow(name, features_only=True, **{} if pyramid else {"depth": 4, "out_indices": (1, -1)})
    strides = [4, 8, 16, 32] if pyramid else [16, 16]
    assert model.feature_info.reduction() == strides
    planes = model(images(64, 50))
    shapes = [(2, c, -(-64 // r), -(-50 // r)) for c, r in zip(model.feature_info.channels(), strides, strict=True)]
    assert [plane.shape for plane in planes] == shapes
    assert all(plane.isfinite().all() for plane in planes)


@pytest.mark.parametrize("name", ["linattn_nalaformer_xtiny", "linattn_deit_tiny_lion"])
def test_the_way_of_timms_train_script(name, tmp_path):
    """Model, optimiser with rates that fall with depth, scheduler, steps, a checkpoint, a resume."""
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.models import resume_checkpoint, safe_model_name
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver

    def build():
        # What the script passes for options that were not given: timm leaves out what is None.
        model = shallow(name, pretrained=False, in_chans=3, num_classes=7, drop_rate=0.1, drop_path_rate=0.2,
                        drop_block_rate=None, global_pool=None, bn_momentum=None, bn_eps=None, scriptable=False,
                        checkpoint_path="")  # fmt: skip
        with torch.no_grad():
            model.get_classifier().weight.mul_(0.5)  # --head-init-scale
        model.set_grad_checkpointing(enable=True)
        model.to(memory_format=torch.channels_last)
        return model, create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.9)

    model, optimizer = build()
    assert safe_model_name(model.default_cfg["architecture"]) == name
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, warmup_epochs=1, warmup_lr=1e-3)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    x = images().contiguous(memory_format=torch.channels_last)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = LabelSmoothingCrossEntropy(0.1)(model(x), torch.tensor([1, 5]))
        loss.backward()
        optimizer.step()
        scheduler.step(step // 2)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    saver.save_checkpoint(0, metric=1.0)
    fresh, its_optimizer = build()
    assert resume_checkpoint(fresh, str(tmp_path / "last.pth.tar"), its_optimizer, log_info=False) == 1
    torch.testing.assert_close(fresh.eval()(x), model.eval()(x), rtol=0, atol=0)


KINDS = ["linattn_nalaformer_xtiny", "linattn_polaformer_pvt_tiny", "linattn_polaformer_swin_tiny", "linattn_qtvit_1"]


def test_names():
    names = timm.list_models("linattn_*")
    assert set(names) == set(TIMM_MODELS)
    assert {*QUICK, "linattn_polaformerpp_b5", "linattn_rala_small", "linattn_polaformer_pvt_medium"} <= set(names)
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
