"""What timm's own test suite asks of a model, of every model that is registered; and the way its train script takes."""

import pytest
import torch
from tests.models.vision.cases import images

timm = pytest.importorskip("timm")

from linattn.models.vision.timm_models import TIMM_MODELS  # noqa: E402

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
    if not pyramid:
        return  # what timm wraps plain transformers in cannot be told to checkpoint
    gradients = []
    for enable in (False, True):
        few = shallow(name, features_only=True, out_indices=(0, 2))
        few.set_grad_checkpointing(enable)
        x = images(64, 50).requires_grad_()
        found = few(x)
        assert [plane.shape for plane in found] == [shapes[0], shapes[2]]
        sum(plane.square().mean() for plane in found).backward()
        gradients.append([x.grad, *(p.grad for p in few.parameters() if p.grad is not None)])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["linattn_nalaformer_xtiny", "linattn_deit_tiny_lion"])
def test_the_way_of_timms_train_script(name, tmp_path):
    """Model, optimiser with rates that fall with depth, scheduler, averaged weights, steps, a checkpoint, a resume."""
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.models import resume_checkpoint, safe_model_name
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

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
    average = ModelEmaV3(model, decay=0.5)
    saver = CheckpointSaver(
        model, optimizer, model_ema=average, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)
    )
    x = images().contiguous(memory_format=torch.channels_last)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = LabelSmoothingCrossEntropy(0.1)(model(x), torch.tensor([1, 5]))
        loss.backward()
        optimizer.step()
        average.update(model, step=step)
        scheduler.step(step // 2)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    saver.save_checkpoint(0, metric=1.0)
    fresh, its_optimizer = build()
    assert resume_checkpoint(fresh, str(tmp_path / "last.pth.tar"), its_optimizer, log_info=False) == 1
    torch.testing.assert_close(fresh.eval()(x), model.eval()(x), rtol=0, atol=0)
    assert not torch.equal(average.module.eval()(x), model(x))
