"""Cosines and sines of a plane are made once, and serve whatever comes later."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn.layers import rotary
from linattn.layers.rotary import plane_rotation


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "_kept", {})


def test_kept_by_plane_width_and_precision():
    x = torch.randn(1, 1, 15, 8)
    one = plane_rotation((3, 5), width=4).of_queries(8, x)
    assert one.cos.shape == one.sin.shape == (15, 2)
    assert plane_rotation((3, 5), width=4).of_keys(8, x).cos is one.cos
    others = [
        plane_rotation((5, 3), width=4).of_queries(8, x),
        plane_rotation((3, 5)).of_queries(8, x),
        plane_rotation((3, 5), width=4).of_queries(8, x.double()),
        plane_rotation((3, 5), width=4, num_prefix_tokens=1).of_queries(8, x),
        plane_rotation((6, 10), width=4, key_shape=(3, 5), stride=2).of_keys(8, x),
    ]
    for other in others:
        assert other.cos is not one.cos
        assert other.cos.shape != one.cos.shape or not torch.equal(other.cos, one.cos.to(other.cos.dtype))


def test_made_in_inference_mode_for_training_later():
    x = torch.randn(1, 1, 15, 8)
    rotation = plane_rotation((3, 5))
    with torch.inference_mode():
        first, _ = rotation(x, x)
    leaf = x.clone().requires_grad_()
    turned, _ = rotation(leaf, leaf)
    (gradient,) = torch.autograd.grad(turned.square().sum(), leaf)  # lengths stay
    torch.testing.assert_close(gradient, 2 * x)
    assert torch.equal(turned.detach(), first)
    assert not rotation.of_queries(8, leaf).cos.requires_grad


def test_stand_ins_are_not_kept():
    x = torch.randn(1, 1, 15, 8)
    with FakeTensorMode() as mode:
        fake = plane_rotation((3, 5))(mode.from_tensor(x), mode.from_tensor(x))[0]
    assert fake.shape == x.shape
    assert type(plane_rotation((3, 5)).of_queries(8, x).cos) is torch.Tensor


def test_widths_that_do_not_fit():
    x = torch.randn(1, 1, 15, 10)
    for width in (4, None, 5):
        with pytest.raises(ValueError, match=f"turn {width or 10} channels .* divide the 10 features"):
            plane_rotation((3, 5), width=width)(x, x)
