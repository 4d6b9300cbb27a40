"""Pyramids, converted and language models in recorded steps: nothing asks the host, and replays are the steps."""

from dataclasses import replace

import pytest
import torch
from tests.lab.train.stand_ins import Keeps, recorded_with
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.lab.tasks import load_images
from linattn.lab.tasks.text import text_task
from linattn.lab.train import loop
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import training_loss
from linattn.lab.train.text.hosts import Host, create_host
from linattn.lab.train.text.loop import TextNetwork
from linattn.models.vision import convert, create_pyramid

SMALL = {
    "embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "head_width": 16,
    "num_classes": 10, "drop_path_rate": 0.2,
}  # fmt: skip
CPU = torch.device("cpu")


def converted(mechanism, in_chans=3, pixels=32):
    timm = pytest.importorskip("timm", reason="the extra `vision` is not installed: nothing to convert")
    model = timm.create_model(
        "deit_tiny_patch16_224", img_size=pixels, patch_size=4, in_chans=in_chans, depth=1, num_classes=10
    )
    return convert(model, mechanism, **({"reflections": 2} if mechanism == "mirror" else {})).model


class HostAsks(TorchDispatchMode):
    """Hears what a recording cannot hold: numbers that the host reads, and tensors that it makes and sends over."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0].strip("_")
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name in [read.strip("_") for read in self.READS]:
            self.heard.append(str(func))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and given and {t.device.type for t in given} != {out.device.type}:
            self.heard.append(f"{func} from {given[0].device} to {out.device}")
        return out


def asks(model, images):
    """On the device ``meta`` no number exists: who needs one is found."""
    model = model.to("meta").train()
    with HostAsks() as watch:
        logits = model(images)
        loss = training_loss(logits, torch.zeros(len(images), dtype=torch.long, device="meta"), 0.1)
        loss.backward()
    return watch.heard


@pytest.mark.parametrize("mechanism", ["softmax", "relu", "pola", "nala", "mirror"])
def test_nothing_in_a_step_asks_the_host(mechanism):
    images = torch.empty(2, 3, 32, 32, device="meta")
    pyramid = create_pyramid("nala", "xt", mechanism, stages="llll", stem_stride=2, img_size=32, **SMALL)
    assert asks(pyramid, images) == []
    if mechanism != "pola":
        assert asks(converted(mechanism), images) == []


def test_who_asks_the_host_is_heard():
    class Reads(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.tensor([2.0]).to(x.device)

    images = torch.empty(2, 3, device="meta")
    assert len(asks(Reads(3, 10), images)) == 1
    with pytest.raises(RuntimeError, match="meta"):
        asks(type("Asks", (Reads,), {"forward": lambda self, x: x * float(x.sum())})(3, 10), images)


@pytest.mark.parametrize("kind", ["pyramid", "converted"])
def test_recorded_steps_are_the_steps(kind, tmp_path, monkeypatch):
    """Statistics of BatchNorm, dropped branches and a mechanism's own parameters included."""
    data = load_images("digits").subset(train=64, test=16, seed=0)
    config = TrainConfig(epochs=2, batch_size=16, lr=3e-3, warmup_epochs=1, graphs=None, ema_decay=0.9)

    def run(folder, **changes):
        torch.manual_seed(3)
        if kind == "pyramid":
            model = create_pyramid("nala", "xt", "mirror", stem_stride=1, img_size=8, in_chans=1, **SMALL)
        else:
            model = converted("mirror", in_chans=1, pixels=8)
        own = replace(config, **changes)
        return model, loop.train(model, create_batches(data, own, CPU), own, folder)

    plain, first = run(tmp_path / "plain", graphs=False)
    made = recorded_with(Keeps, monkeypatch)
    recorded, second = run(tmp_path / "recorded")
    assert (made[0].recorded, made[0].replays) == (1, 8)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(recorded.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert [r.top1 for r in second.epochs] == [r.top1 for r in first.epochs]


@pytest.mark.parametrize("canon", [None, "ABCD"])
@pytest.mark.parametrize("mechanism", ["softmax", "elu", "retention", "gated", "mlstm", "zeros", "lion"])
def test_nothing_in_a_step_of_a_language_model_asks_the_host(mechanism, canon):
    task = text_task("mqar", vocab=64, length=16)
    network = TextNetwork(create_host(Host(size="mqar", mechanism=mechanism, canon=canon, width=16), task, 0), task)
    network = network.to("meta").train()
    batch = task.train_batch(2, 0, 0).to(torch.device("meta"))
    with HostAsks() as watch:
        loss, hits = network(batch, torch.empty(8, dtype=torch.long, device="meta"))
        loss.backward()
    assert watch.heard == []
    assert hits.device.type == "meta"
