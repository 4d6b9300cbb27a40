"""Sign-opposed interactions: which mechanisms keep them, against formulas."""

import pytest
import torch

from linattn import create_mechanism, list_mechanisms
from linattn.analysis.attention_map import attention_map
from linattn.analysis.opposed import opposed_kept, pairwise_features

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
    found = opposed_kept(create_mechanism(name, num_heads=2, head_dim=8), q, k, x=x)
    if name in UNDEFINED:
        assert found == [None, None]
    elif name in BETWEEN:
        assert all(0 < share < 0.5 for share in found)
    else:
        assert found == [0.0 if name in LOST else 1.0] * 2


@pytest.mark.parametrize("name", ["elu", "pola", "agent", "relu", "gated"])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_and_causal(name, causal):
    if causal and name == "agent":
        causal = False  # it has no causal form
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


def mirror_share(mirror, q, k) -> list[float]:
    """By the matrix of the reflection: ``sum_f H_fi^2 [y_tf > 0] [y_sf > 0]`` over the head's own features."""
    H = mirror.reflection_matrix().detach()
    shares = []
    for h in range(q.shape[1]):
        kept = total = 0.0
        for i in range(8):
            b = (h * 8 + i) % len(q)  # channels take turns among the images
            y, z = (H @ t[b].transpose(0, 1).flatten(1).mT for t in (q, k))  # (H D, T)
            own = slice(8 * h, 8 * h + 8)
            column = H[own, h * 8 + i].square()
            both = torch.einsum("f,ft,fs->ts", column, (y[own] > 0).double(), (z[own] > 0).double()) / column.sum()
            weight = (-q[b, h, :, i, None] * k[b, h, None, :, i]).clamp(min=0)
            kept, total = kept + float((both * weight).sum()), total + float(weight.sum())
        shares.append(kept / total)
    return shares


@pytest.mark.parametrize("cross_head", [True, False])
def test_mirror_by_its_matrix(cross_head):
    torch.manual_seed(0)
    mirror = create_mechanism("mirror", num_heads=2, head_dim=8, modulation="none", cross_head=cross_head).double()
    q, k, _ = draw()
    assert opposed_kept(mirror, q, k) == pytest.approx(mirror_share(mirror, q, k), abs=1e-6)


def test_nothing_opposed():
    q, k, _ = draw()
    for name in ("relu", "elu", "softmax"):
        assert opposed_kept(create_mechanism(name, num_heads=2, head_dim=8), q.abs(), k.abs()) == [None, None]


@pytest.mark.parametrize(("name", "kv_heads"), [("elu", 2), ("pola", 4), ("pola", 2), ("agent", 2), ("taylor", 2)])
def test_features_make_the_weights(name, kv_heads):
    """Row-normalised products of the features are the map, flow by flow."""
    q, k, _ = draw(heads=4, kv_heads=kv_heads)
    mechanism = create_mechanism(name, num_heads=4, num_kv_heads=kv_heads, head_dim=8).double()
    found = pairwise_features(mechanism, q, k)
    products = found.phi @ found.psi.mT
    weights = (products / products.sum(-1, keepdim=True)).mean(2)
    torch.testing.assert_close(weights, attention_map(mechanism, q, k), rtol=0, atol=1e-5)
    assert pairwise_features(create_mechanism("softmax", num_heads=4, head_dim=8), q, q) is None
