"""Training in CUDA graphs against training kernel by kernel: images and text, resumed, and what cannot be recorded.

Two runs in bf16 drift apart however they are launched; how far is allowed comes from data: as far as one of them is
from the same run in fp32.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from tests.lab.train.text import small_text

from linattn.lab.train import captured_step
from linattn.lab.train.captured_step import Recorder
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import train
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.hosts import Host
from linattn.models.vision import create_vit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # configs are made where there is no GPU, too
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")]
STEPS = 20
IMAGES = TrainConfig(
    epochs=2, batch_size=64, lr=1e-3, warmup_epochs=1, ema_decay=0.9, precision="bf16", device=DEVICE, graphs=False
)
TEXT = TextConfig(
    steps=STEPS, batch_size=16, lr=1e-3, warmup_steps=5, eval_every=10, precision="bf16", device=DEVICE, graphs=False
)


class Drawn:
    """Images of ten classes, drawn on the device anew in each epoch, in steps of one size."""

    steps_per_epoch = STEPS // 2

    def train(self, epoch, first_step=0):
        labels = torch.randint(10, (STEPS // 2, 64), generator=torch.Generator().manual_seed(epoch)).cuda()
        noise = torch.Generator("cuda").manual_seed(epoch)
        images = torch.randn(STEPS // 2, 64, 1, 28, 28, device="cuda", generator=noise)
        images += labels[..., None, None, None] / 5
        for step in range(first_step, STEPS // 2):
            yield images[step], labels[step]

    def test(self):
        yield from list(self.train(99))[:2]


@pytest.fixture
def replays(monkeypatch):
    """One entry a replay."""
    counted = []

    class Counting(Recorder):
        def record(self, run):
            replay = super().record(run)
            return lambda: counted.append(1) or replay()

    monkeypatch.setattr(captured_step, "Recorder", Counting)
    return counted


def vit(mechanism):
    torch.manual_seed(0)
    size = {"img_size": 28, "in_chans": 1, "patch_size": 2, "depth": 2, "num_classes": 10}
    return create_vit("tiny", mechanism, drop_path_rate=0.2 if mechanism == "mirror" else 0.0, **size)


def on_images(folder, mechanism, **changes):
    torch._dynamo.reset()
    model = vit(mechanism)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    train(model, Drawn(), replace(IMAGES, **changes), folder)
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]) - start


def on_text(folder, mechanism, dropout=0.0, **changes):
    torch._dynamo.reset()
    host = Host(size="pico", mechanism=mechanism, canon="B", width=64, depth=2, dropout=dropout)
    start = small_text.create_host(host, small_text.TASK, 0)
    model, _ = small_text.run(folder, replace(TEXT, **changes), host)
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return torch.cat([(a.detach().cpu() - b.detach()).flatten() for a, b in pairs])


def assert_same_training(graph, eager, exact):
    """Changes of all weights over a run."""
    rounding = (eager - exact).norm()
    assert 0 < rounding < 0.5 * exact.norm(), "else this says nothing"
    assert (graph - exact).norm() <= 2 * rounding
    assert (graph - eager).norm() <= rounding


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mechanism", ["softmax", "relu", "mirror"])
def test_images_train_the_same(mechanism, compile, tmp_path, replays):
    exact = on_images(tmp_path / "exact", mechanism, precision="fp32")
    eager = on_images(tmp_path / "eager", mechanism, compile=compile)
    assert not replays
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training without CUDA graphs")
        graph = on_images(tmp_path / "graph", mechanism, compile=compile, graphs=None)
    assert len(replays) == STEPS
    assert_same_training(graph, eager, exact)


@pytest.mark.parametrize("mechanism", ["gated", "mlstm"])
def test_text_trains_the_same(mechanism, tmp_path, replays):
    exact = on_text(tmp_path / "exact", mechanism, precision="fp32")
    eager = on_text(tmp_path / "eager", mechanism)
    assert not replays
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training without CUDA graphs")
        graph = on_text(tmp_path / "graph", mechanism, graphs=True)
    assert len(replays) == STEPS
    assert_same_training(graph, eager, exact)


def test_a_step_that_waits_for_the_device_is_told_and_trained_as_it_is(tmp_path, replays):
    """Also: after a recording that broke off, seeds and memory are in order."""
    plain = on_images(tmp_path / "plain", "mirror")

    def waits(module, inputs):
        if inputs[0].sum().item() > 1e9:
            raise AssertionError

    made = vit("mirror")
    start = torch.cat([p.detach().flatten() for p in made.parameters()])
    made.register_forward_pre_hook(waits)
    with pytest.warns(RuntimeWarning, match="the step cannot be recorded") as told:
        train(made, Drawn(), replace(IMAGES, graphs=True), tmp_path / "waits")
    assert len([w for w in told if "CUDA graphs" in str(w.message)]) == 1
    assert not replays
    found = torch.cat([p.detach().flatten().cpu() for p in made.parameters()]) - start
    exact = on_images(tmp_path / "exact", "mirror", precision="fp32")
    assert_same_training(found, plain, exact)
    again = on_images(tmp_path / "again", "mirror", graphs=True)
    assert len(replays) == STEPS, "another run in the same process records"
    assert torch.isfinite(again).all()
