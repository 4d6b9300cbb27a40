"""Two orders of the tokens of a plane: gradients through both."""

import torch

from linattn.mechanisms.common.decays import Orders


def test_spreading_and_gathering_are_transposes():
    x = torch.randn(2, 1, 7, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 1, 14, 6, dtype=torch.float64, requires_grad=True)
    one, two = torch.tensor([3, 0, 6, 1, 5, 2, 4]), torch.tensor([6, 2, 1, 0, 4, 3, 5])
    orders = Orders(torch.cat([one, two]), torch.cat([one.argsort(), 7 + two.argsort()]))
    torch.testing.assert_close(orders.spread(x), torch.cat([x[:, :, one], x[:, :, two]], dim=2))
    back = y[:, :, :7][:, :, one.argsort()] + y[:, :, 7:][:, :, two.argsort()]
    torch.testing.assert_close(orders.gather(y), back)
    for function, argument in ((orders.spread, x), (orders.gather, y)):
        assert torch.autograd.gradcheck(function, argument)
        assert torch.autograd.gradgradcheck(function, argument)
