"""How often a run compiles: equal blocks once for training and once for evaluation, at all rates of DropPath."""

from functools import partial

import pytest
import torch
from tests.lab.train.stand_ins import Keeps, recorded_with

from linattn.lab.tasks import load_images
from linattn.lab.train import loop, rounds
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.models.vision import create_pyramid, create_vit
from linattn.support.compiling import compile_blocks

CPU = torch.device("cpu")
SHAPES = {"embed_dims": (8, 16, 16, 32), "depths": (2, 1, 1, 2), "num_heads": (1, 1, 2, 2), "head_width": 16}


class Counts:
    """A backend that computes as it is written, and keeps what it was handed: ``(training, numbers, shapes)``."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        shapes = [tuple(given.shape) for given in inputs if isinstance(given, torch.Tensor)]
        numbers = [given for given in inputs if not isinstance(given, torch.Tensor)]
        self.graphs.append((torch.is_grad_enabled(), numbers, shapes))
        return graph.forward

    @property
    def training(self):
        return [training for training, _, _ in self.graphs].count(True)


@pytest.fixture
def backend(monkeypatch):
    torch._dynamo.reset()
    found = Counts()
    monkeypatch.setattr(rounds, "compile_blocks", partial(compile_blocks, backend=found, fullgraph=True))
    yield found
    torch._dynamo.reset()


def train(model, folder, patch):
    made = recorded_with(Keeps, patch)
    data = load_images("digits").subset(train=64, test=20, seed=0)
    config = TrainConfig(
        epochs=2, batch_size=16, warmup_epochs=1, compile=True, graphs=None, precision="bf16", ema_decay=0.9
    )
    loop.train(model, create_batches(data, config, CPU), config, folder)
    assert (made[0].recorded, made[0].replays) == (1, 8)


def test_a_pyramid_compiles_each_kind_of_block_once(backend, tmp_path, monkeypatch):
    """Four kinds, in mixed precision, with averaged weights, a smaller last batch and a plane for each stage."""
    model = create_pyramid("nala", "xt", "relu", stem_stride=1, img_size=16, in_chans=1, num_classes=10,
                           drop_path_rate=0.2, **SHAPES)  # fmt: skip
    # Digits have 8 pixels a side, and torch tells apart how a plane of one token is laid out: 2 x 2 in the last stage.
    model.stem = torch.nn.Sequential(torch.nn.Upsample(scale_factor=2), model.stem)
    train(model, tmp_path, monkeypatch)
    assert (len(backend.graphs), backend.training) == (8, 4)
    assert not any(numbers for _, numbers, _ in backend.graphs), "sizes are fixed"


def test_blocks_of_all_rates_share_a_graph(backend, tmp_path, monkeypatch):
    train(create_vit("digits", "relu", depth=4, patch_size=4, drop_path_rate=0.2), tmp_path, monkeypatch)
    assert (len(backend.graphs), backend.training) == (2, 1)
