import math

import pytest
import torch

from linattn.lab.train.config import TrainConfig, learning_rate
from linattn.support.schedule import warmed_line


@pytest.mark.parametrize(("epochs", "steps", "warmup"), [(5, 7, 2), (3, 10, 0.25), (4, 3, 0), (2, 5, 2)])
def test_it_is_a_ramp_and_then_torchs_cosine(epochs, steps, warmup):
    """torch's schedulers are stepped one by one; ours is read at each step."""
    config = TrainConfig(epochs=epochs, lr=0.3, min_lr=0.01, warmup_epochs=warmup)
    total, ramp = epochs * steps, round(warmup * steps)
    ours = [learning_rate(step, steps, config) for step in range(total)]
    for step in range(ramp):
        assert ours[step] == pytest.approx(0.3 * (step + 1) / ramp, rel=1e-12)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    if total > ramp:
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - ramp, eta_min=0.01)
        for step in range(ramp, total):
            optimizer.step()
            cosine.step()
            assert ours[step] == pytest.approx(cosine.get_last_lr()[0], rel=1e-9)
        assert ours[-1] == pytest.approx(0.01)


def test_the_area_under_the_cosine_is_that_of_its_mean():
    """An error in the length of the cosine shows in its integral: the mean is halfway between lr and min_lr."""
    config = TrainConfig(epochs=10, lr=1.0, min_lr=0.2, warmup_epochs=2)
    values = [learning_rate(step, 1000, config) for step in range(2000, 10000)]
    assert math.fsum(values) / len(values) == pytest.approx(0.6, abs=1e-3)  # a sum of 8,000 bars for an integral


@pytest.mark.parametrize(("total", "ramp"), [(20, 4), (9, 0), (3, 2)])
def test_a_line_is_a_ramp_and_then_torchs_line(total, ramp):
    ours = [warmed_line(step, total, ramp, 0.3, 0.03) for step in range(total)]
    assert ours[:ramp] == pytest.approx([0.3 * (step + 1) / ramp for step in range(ramp)], rel=1e-12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.3)
    line = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total - ramp)
    for step in range(ramp, total):
        optimizer.step()
        line.step()
        assert ours[step] == pytest.approx(line.get_last_lr()[0], rel=1e-9)
    assert warmed_line(1, 2, 2, 0.3, 0.1) == 0.3  # nothing is left to fall
