import pytest
import torch

from linattn.support.schedule import warmed_cosine, warmed_line


@pytest.mark.parametrize(("total", "ramp"), [(35, 14), (30, 2), (12, 0), (9, 0), (3, 2), (4, 4)])
@pytest.mark.parametrize("ours", [warmed_cosine, warmed_line])
def test_it_is_a_ramp_and_then_torchs_schedule(ours, total, ramp):
    """torch's schedulers are stepped one by one; ours is read at each step."""
    rates = [ours(step, total, ramp, 0.3, 0.03) for step in range(total)]
    assert rates[:ramp] == pytest.approx([0.3 * (step + 1) / ramp for step in range(ramp)], rel=1e-12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.3)
    if ours is warmed_line:
        plain = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, max(1, total - ramp))
    else:
        plain = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total - ramp), eta_min=0.03)
    for step in range(ramp, total):
        optimizer.step()
        plain.step()
        assert rates[step] == pytest.approx(plain.get_last_lr()[0], rel=1e-9)
