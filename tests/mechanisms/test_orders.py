"""Two orders of the tokens of a plane: where each token stands, and gradients through both."""

import pytest
import torch

from linattn.mechanisms.base import Call
from linattn.mechanisms.common.decays import Orders, plane_orders
from mechanisms.formulas import draw


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 4), (4, 3), (4, 4)], ids=str)
def test_orders_and_their_places(shape):
    _, k, _ = draw(length=2 + shape[0] * shape[1])
    T = k.shape[2]
    tokens, places = plane_orders(k, Call("auto", spatial_shape=shape), 2)
    for i in range(2):
        torch.testing.assert_close(tokens[places[i * T : (i + 1) * T]], torch.arange(T))
        assert places[i * T : (i + 1) * T].sort().values.tolist() == list(range(i * T, (i + 1) * T))


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
