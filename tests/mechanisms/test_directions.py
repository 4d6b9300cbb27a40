"""Lengths and directions, at zero too."""

import torch

from linattn.ops.maps.powers import direction_of, length_of


def test_directions():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(direction_of(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    torch.testing.assert_close(length_of(x), torch.tensor([[5.0], [0.0]]), rtol=1e-6, atol=2e-6)
    (gradient,) = torch.autograd.grad((direction_of(x) + length_of(x)).sum(), x)
    assert gradient.isfinite().all()
    assert length_of(x.half()).dtype == torch.float32
