"""The maps of the linear part: their formulas, where they start, and that random features are the kernel's."""

import pytest
import torch
from torch.testing import assert_close

from linattn.convert.core import HedgehogMap, NPMap, RandomFeatures, T2RMap

HEADS, KV_HEADS, T, D = 4, 2, 5, 8


def draw(*shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale


def test_np_starts_as_softmax_of_the_input_and_keeps_its_norm():
    x, np_map = draw(2, HEADS, T, D), NPMap(HEADS, D, D).double()
    assert_close(np_map(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1), rtol=1e-5, atol=1e-6)
    torch.nn.init.normal_(np_map.weight)
    first = np_map(x)[..., :D].log()
    u = first - first.mean(-1, keepdim=True)  # softmax gives u up to a constant
    for h in range(HEADS):
        f = x[:, h] @ np_map.weight[h]
        wanted = f / f.norm(dim=-1, keepdim=True) * x[:, h].norm(dim=-1, keepdim=True)
        assert_close(u[:, h], wanted - wanted.mean(-1, keepdim=True), rtol=1e-6, atol=1e-6)


def test_np_has_gradients_at_zero_vectors():
    x = torch.zeros(1, HEADS, 1, D, requires_grad=True)
    np_map = NPMap(HEADS, D, 3)
    np_map(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *np_map.parameters()))


def test_hedgehog_and_t2r_are_their_formulas():
    x = draw(2, HEADS, T, D)
    hedgehog, t2r = HedgehogMap(HEADS, D, 3).double(), T2RMap(HEADS, D, 3).double()
    torch.nn.init.normal_(t2r.bias)
    assert_close(hedgehog(x)[..., 3:], torch.softmax(-x @ hedgehog.weight, -1))
    assert_close(t2r(x), (x @ t2r.weight + t2r.bias).relu())
    assert_close(HedgehogMap(HEADS, D, D).double()(x)[..., :D], x.softmax(-1))


@pytest.mark.parametrize("centred", [False, True])
def test_random_features_average_to_the_exponential(centred):
    """With many features ``phi(q) . psi(k) = e^{q . k / sqrt(D)}``, whatever constant was taken from the keys."""
    torch.manual_seed(0)
    q, k = draw(1, HEADS, T, D, scale=0.4), draw(1, KV_HEADS, T, D, scale=0.4) + 0.5
    features = RandomFeatures(KV_HEADS, D, 40_000).double()
    if centred:
        features.center.copy_(k.mean((0, 2)))
        features.log_unit.copy_(torch.tensor([0.5, -1.0]))
    phi, psi = features(q, k)
    found = phi @ psi.repeat_interleave(2, 1).mT
    assert_close(found, (q @ k.repeat_interleave(2, 1).mT / D**0.5).exp(), rtol=0.1, atol=0.0)
    # In units of their largest feature queries differ by a factor per row, and do not overflow.
    features.relative = True
    relative, _ = features(q, k)
    ratio = relative / phi
    assert_close(ratio, ratio[..., :1].expand_as(ratio))
    assert features(q * 100, k)[0].amax(-1).eq(1).all()


def test_maps_do_not_work_in_16_bits():
    x = draw(1, HEADS, T, D).bfloat16()
    for kind in (NPMap, HedgehogMap, T2RMap):
        own = kind(HEADS, D, D).bfloat16()
        wanted = kind(HEADS, D, D).double()
        wanted.load_state_dict(own.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            found = own(x)
        assert found.dtype == torch.float32
        assert_close(found.double(), wanted(x.double()), rtol=1e-4, atol=1e-5)
