"""Attention whose output is a Lorentz centroid: which mechanisms it is for, and points that are hard for it."""

import pytest
import torch

import linattn
from linattn.models.graph import SplitAttention, read_graph
from linattn.models.graph.manifold import Split
from linattn.models.graph.split_attention import NOT_FOR_CENTROIDS
from linattn.models.graph.split_layers import Signature
from models.graph.graphs import close, random_graph, random_points

NODES = 10


def weights_by_channel(name):
    """``(D, N, N)``: how much of each node's v every channel of the output has, and the output for twice that v."""
    mechanism = linattn.create_mechanism(name, num_heads=1, head_dim=NODES, input_dim=4)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    (q, k), x = torch.randn(2, 1, 1, NODES, NODES), torch.randn(1, NODES, 4)
    basis = torch.eye(NODES)
    turned = [basis.roll(turn, 1) for turn in range(NODES)]  # node j in channel j + turn
    with torch.no_grad():
        once, twice = (torch.stack([mechanism(q, k, n * v[None, None], x=x)[0, 0] for v in turned]) for n in (1, 2))
    return (torch.stack([torch.stack([o.roll(-t, 1) for t, o in enumerate(each)]) for each in (once, twice)])).unbind()


@pytest.mark.parametrize("name", linattn.list_mechanisms(bidirectional=True))
def test_mechanisms_that_give_other_sums_than_a_centroid_needs_are_refused(name):
    once, twice = weights_by_channel(name)
    same = bool((once - once[:1]).abs().max() < 1e-9)
    suits = same and bool(once.min() > -1e-12) and bool((twice - 2 * once).abs().max() < 1e-9)
    assert suits == (name not in NOT_FOR_CENTROIDS)
    if not suits:
        with pytest.raises(ValueError, match=f"centroid=True needs .* mechanism '{name}' gives others"):
            SplitAttention(Signature(3, 4), 1, name, centroid=True)


@pytest.mark.parametrize("name", ["elu", "lion"])
def test_heights_have_the_weights_of_the_space_part(name):
    """Its temperature and the layer's input among what they are made of."""
    data = read_graph(random_graph(9))
    x = random_points((3, 4), 9)
    options = {"decay": "selective"} if name == "lion" else {}
    layer = SplitAttention(Signature(3, 4), 2, name, centroid=True, temperature=True, mechanism_options=options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    qkv, part = layer.qkv(x).space, layer.parts["space"]
    close(part.mean_of(qkv[:, -2:], qkv, x.joined(), data), part(qkv, x.joined(), data))


@pytest.mark.parametrize("name", ["relu", "cosformer", "nala"])
def test_a_node_that_sees_none_becomes_the_pole(name):
    """Features that ReLU has cut off leave weights of 0, and there is no middle of no points."""
    for seed in range(12):
        torch.manual_seed(seed)
        layer = SplitAttention(Signature(2, 1), 1, name, centroid=True)
        x = random_points((2, 1), 9)
        got = layer(x, read_graph(random_graph(9)))
        got.joined().sum().backward()
        assert got.joined().isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters() if parameter.grad is not None)
        plain = SplitAttention(Signature(2, 1), 1, name)
        plain.load_state_dict(layer.state_dict())
        unseen = plain(x, read_graph(random_graph(9))).space == 0
        assert torch.equal(got.space[unseen], torch.zeros_like(got.space[unseen]))
        if unseen.any():
            return
    raise AssertionError("no draw has a node without weights")


def test_far_points_do_not_vanish_in_rounding():
    """In fp32 the height of a far point is the length of its space part: the sum of weights bounds their difference."""
    layer, data = SplitAttention(Signature(0, 3), 1, centroid=True).float(), random_graph(9)
    with torch.no_grad():
        layer.qkv.space.weight[-3:] *= 1e6
    data.x = data.x.float()
    for _ in range(10):
        x = random_points((0, 3), 1)
        same = Split(x.sphere.float().expand(9, -1), x.space.float().expand(9, -1), 1.0)
        length = layer(same, read_graph(data)).space.norm(dim=1)
        assert length.isfinite().all()
        assert length.min() > 1
