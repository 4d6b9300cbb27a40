"""What truncation costs: energy cut off by a ReLU, and which mechanisms keep sign-opposed interactions, by formulas."""

import pytest
import torch

from linattn import create_mechanism, list_mechanisms
from linattn.analysis.attention_map import attention_map
from linattn.analysis.truncation import energy_lost, energy_sums, opposed_kept, pairwise_features

LOST = {"relu", "focused", "cosformer", "nala"}
BETWEEN = {"mirror"}
UNDEFINED = {"hydra", "mlstm", "zeros", "zeros_softmax"}  # not one call of the algebra over channels of a pair


def draw(heads: int = 2, kv_heads: int = 2, tokens: int = 9, width: int = 8, images: int = 3):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(images, h, tokens, width, generator=generator, dtype=torch.float64) for h in (heads, kv_heads))
    return q, k, torch.randn(images, tokens, heads * width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", list_mechanisms(bidirectional=True))
def test_every_mechanism(name):
    torch.manual_seed(0)
    q, k, x = draw()
    mechanism = create_mechanism(name, num_heads=2, head_dim=8)
    found = opposed_kept(mechanism, q, k, x=x)
    if name in UNDEFINED:
        assert found == [None, None]
    elif name in BETWEEN:
        assert all(0 < share < 0.5 for share in found)
    else:
        assert found == [0.0 if name in LOST else 1.0] * 2
        assert opposed_kept(mechanism, q.abs(), k.abs(), x=x) == [None, None]  # nothing is opposed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "pola", "relu", "gated"])
def test_grouped_and_causal(name, causal):
    q, k, x = draw(heads=4, kv_heads=2)
    mechanism = create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=8, causal=causal)
    assert opposed_kept(mechanism, q, k, x=x) == [0.0 if name == "relu" else 1.0] * 4


def test_mixed_derivatives_weigh_interactions_by_their_size():
    """A map that keeps channel 0 alone: the share is that of its products among the opposed ones."""
    elu = create_mechanism("elu", num_heads=1, head_dim=8)
    elu.arguments = lambda q, k, v, x: {"q": q * (torch.arange(8) == 0), "k": k, "v": v}
    q, k, _ = draw(heads=1, kv_heads=1, images=2)
    products = (-q[:, 0, :, None] * k[:, 0, None, :]).clamp(min=0).sum((0, 1, 2))
    assert opposed_kept(elu, q, k) == pytest.approx([float(products[0] / products.sum())])


@pytest.mark.parametrize("cross_head", [True, False])
def test_mirror_by_its_matrix(cross_head):
    """``sum_f H_fi^2 [y_tf > 0] [y_sf > 0]`` over the head's own features; channels take turns among the images."""
    torch.manual_seed(0)
    mirror = create_mechanism("mirror", num_heads=2, head_dim=8, modulation="none", cross_head=cross_head).double()
    q, k, _ = draw()
    H, shares = mirror.reflection_matrix().detach(), torch.zeros(2, 2)
    for channel in range(16):
        b, (h, i) = channel % len(q), divmod(channel, 8)
        own = slice(8 * h, 8 * h + 8)
        y, z = ((H @ t[b].transpose(0, 1).flatten(1).mT)[own].relu().sign() for t in (q, k))  # (D, T)
        both = torch.einsum("f,ft,fs->ts", H[own, channel].square(), y, z) / H[own, channel].square().sum()
        weight = (-q[b, h, :, i, None] * k[b, h, None, :, i]).clamp(min=0)
        shares[h] += torch.tensor([(both * weight).sum(), weight.sum()])
    assert opposed_kept(mirror, q, k) == pytest.approx((shares[:, 0] / shares[:, 1]).tolist(), abs=1e-6)


@pytest.mark.parametrize(("name", "kv_heads"), [("elu", 2), ("pola", 4), ("pola", 2), ("agent", 2), ("taylor", 2)])
def test_features_make_the_weights(name, kv_heads):
    """Row-normalised products of the features are the map, flow by flow."""
    q, k, _ = draw(heads=4, kv_heads=kv_heads)
    mechanism = create_mechanism(name, num_heads=4, num_kv_heads=kv_heads, head_dim=8).double()
    phi, psi = pairwise_features(mechanism, q, k, None)
    products = phi @ psi.mT
    weights = (products / products.sum(-1, keepdim=True)).mean(2)
    torch.testing.assert_close(weights, attention_map(mechanism, q, k), rtol=0, atol=1e-5)
    assert pairwise_features(create_mechanism("softmax", num_heads=4, head_dim=8), q, q, None) is None


def test_energy_of_each_head_with_its_keys():
    q, k = draw(4, 2, images=2)[:2]
    relu = create_mechanism("relu", num_heads=4, num_kv_heads=2, head_dim=8)
    expected = []
    for h in range(4):
        own = torch.cat([q[:, h].flatten(), k[:, h // 2].flatten()])
        expected.append(float(own[own < 0].square().sum() / own.square().sum()))
    assert energy_lost(relu, q, k) == pytest.approx(expected)
    assert energy_lost(relu, q.abs(), k.abs()) == [0.0] * 4
    assert energy_lost(relu, -q.abs(), -k.abs()) == [1.0] * 4
    assert energy_lost(relu, q * 0, k * 0) == [None] * 4
    assert energy_lost(create_mechanism("pola", num_heads=4, num_kv_heads=2, head_dim=8), q, k) == [0.0] * 4


@pytest.mark.parametrize("modulation", ["sequence", "none"])
def test_mirror_counts_what_it_reflected(modulation):
    torch.manual_seed(0)
    q, k = (x + shift for x, shift in zip(draw(images=2)[:2], (1, -1), strict=True))
    mirror = create_mechanism("mirror", num_heads=2, head_dim=8, modulation=modulation).double()
    lost, total = energy_sums(mirror, q, k)
    assert float(lost.sum() / total.sum()) == pytest.approx(mirror.energy_loss(q, k).item())
    relu = create_mechanism("relu", num_heads=2, head_dim=8)
    assert energy_lost(mirror, q, k) != pytest.approx(energy_lost(relu, q, k), abs=0.01)
    assert float(total.sum()) == pytest.approx(float(q.square().sum() + k.square().sum()))  # an isometry


def test_inputs_are_turned_before_they_are_cut():
    q, k = (x.abs() for x in draw(images=1)[:2])
    relu = create_mechanism("relu", num_heads=2, head_dim=8)
    for rotates, lost in (("inputs", 1.0), ("features", 0.0)):
        relu.rotates = rotates
        assert energy_lost(relu, q, k, rotate=lambda q, k: (-q, -k)) == [lost, lost]
