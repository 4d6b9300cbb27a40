"""Splits: nothing is in two parts, and nothing that is asked for is seen in training."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.lab.tasks.graph.data import pair_codes
from linattn.lab.tasks.graph.generated import communities, random_graph
from linattn.lab.tasks.graph.splits import NegativeSampler, per_class_split, split_links, stratified_split


def codes(pairs, data):
    """As sets, whatever the direction; every pair must be there once."""
    found = pair_codes(pairs, data.num_nodes)
    assert len(found) == pairs.shape[1]
    return set(found.tolist())


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.sampled_from([40, 150, 900]),  # the last is past where all pairs are looked at
    degree=st.integers(2, 12),
    seed=st.integers(0, 10**6),
    shares=st.sampled_from([(0.05, 0.1), (0.3, 0.4), (0.01, 0.01)]),
)
def test_links_are_split_undirected_and_disjoint(nodes, degree, seed, shares):
    data = random_graph(nodes, degree, seed)
    split = split_links(data, seed, val=shares[0], test=shares[1])
    edges = set(pair_codes(data.edge_index, nodes).tolist())
    positive, negative = [], []
    for part in (split.val, split.test):
        is_edge = part.edge_label == 1
        assert int(is_edge.sum()) * 2 == len(is_edge)
        positive.append(codes(part.edge_label_index[:, is_edge], data))
        negative.append(codes(part.edge_label_index[:, ~is_edge], data))
    training = codes(split.train, data)
    assert training | positive[0] | positive[1] == edges
    assert len(training) + len(positive[0]) + len(positive[1]) == len(edges)
    assert len(positive[1]) == max(1, round(shares[1] * len(edges)))
    assert not (negative[0] | negative[1]) & edges
    assert not negative[0] & negative[1]
    message = split.data.edge_index
    assert set(pair_codes(message, nodes).tolist()) == training
    assert message.shape[1] == 2 * len(training)
    pairs = split.training_pairs(torch.Generator().manual_seed(seed))
    drawn = codes(pairs.edge_label_index[:, pairs.edge_label == 0], data)
    assert codes(pairs.edge_label_index[:, pairs.edge_label == 1], data) == training
    assert not drawn & (edges | negative[0] | negative[1])


def test_pairs_without_an_edge_are_drawn_evenly():
    """All 9 free pairs of 5 nodes with one edge: of 9,000 draws each has 1,000, within five standard deviations."""
    sampler = NegativeSampler(5, torch.tensor([1]))
    draw = torch.Generator().manual_seed(0)
    drawn = torch.cat([sampler.draw(1, draw) for _ in range(9000)], 1)
    counts = (drawn[0] * 5 + drawn[1]).bincount(minlength=25)
    assert int((counts > 0).sum()) == 9
    assert (counts[counts > 0] - 1000).abs().max() < 5 * 1000**0.5
    with pytest.raises(ValueError, match="10 pairs without an edge are asked for, at most 9"):
        sampler.draw(10, draw)


def test_nodes_are_split_by_class():
    data = communities(301, 3, seed=1)
    for found in (stratified_split(data, 5, train=0.5, val=0.2), per_class_split(data, 5, train=20, val=50, test=100)):
        masks = torch.stack([found.train_mask, found.val_mask, found.test_mask])
        assert int(masks.sum(0).max()) == 1
    assert data.y[found.train_mask].bincount().tolist() == [20, 20, 20]
    assert masks.sum(1).tolist() == [60, 50, 100]
    shares = stratified_split(data, 5, train=0.5, val=0.2)
    assert torch.stack([shares.train_mask, shares.val_mask, shares.test_mask]).sum() == 301
    for mask, share in ((shares.train_mask, 0.5), (shares.val_mask, 0.2), (shares.test_mask, 0.3)):
        assert (data.y[mask].bincount() - share * data.y.bincount()).abs().max() <= 1.5
    with pytest.raises(ValueError, match="needs 101 nodes of each class"):
        per_class_split(data, 0, train=101)
