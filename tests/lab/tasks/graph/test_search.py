"""Curvature against its definition pair by pair, and the spaces of graphs whose curvature is known."""

from itertools import permutations
from statistics import mean

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import shortest_path

from linattn.lab.screen import Screen
from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.generated import cycle, grid, random_graph, tree
from linattn.lab.tasks.graph.search import (
    SearchSpace,
    distances,
    nearest_signature,
    search_signature,
    sectional_curvature,
)
from linattn.support.options import OptionError


def neighbours_of(data):
    found = [set() for _ in range(data.num_nodes)]
    for a, b in data.edge_index.T.tolist():
        found[a].add(b)
    return found


def distances_of_scipy(data):
    n, edges = data.num_nodes, data.edge_index.numpy()
    found = shortest_path(coo_array((np.ones(edges.shape[1]), edges), shape=(n, n)), unweighted=True)
    return np.where(np.isinf(found), -1, found).astype(int).tolist()


def curvature_pair_by_pair(data):
    """The definition: ordered pairs of neighbours, all other nodes as references."""
    near, d, found = neighbours_of(data), distances_of_scipy(data), []
    for m in range(data.num_nodes):
        of_pairs = []
        for b, c in permutations(sorted(near[m]), 2):
            far = 1 if c in near[b] else 2
            of_a = [
                d[a][m] / 2 + far**2 / (8 * d[a][m]) - (d[a][b] ** 2 + d[a][c] ** 2) / (4 * d[a][m])
                for a in range(data.num_nodes)
                if d[a][m] > 0
            ]
            of_pairs.append(mean(of_a))
        if of_pairs:
            found.append(mean(of_pairs))
    return found


# A triangle with a tail, a ring beside it, and a node alone.
PARTS = torch.tensor([[0, 1, 2, 2, 4, 5, 6, 7], [1, 2, 0, 3, 5, 6, 7, 4]])
GRAPHS = {"parts": GraphData.of_edges(torch.eye(9), PARTS), "random": random_graph(40, 5), "tree": tree(3, 3)}


@pytest.mark.parametrize("name", GRAPHS)
def test_distances_and_curvature_are_those_of_the_definition(name):
    data = GRAPHS[name]
    found = distances(data.edge_index, data.num_nodes, torch.arange(data.num_nodes))
    assert found.tolist() == distances_of_scipy(data)
    curvature = sectional_curvature(data.edge_index, data.num_nodes, references=1000, pairs=1000)
    expected = torch.tensor(curvature_pair_by_pair(data))
    torch.testing.assert_close(curvature, expected, rtol=0, atol=1e-5)  # some hundred fp32 sums of numbers below 10


@pytest.mark.parametrize(
    ("data", "wanted", "kind"),
    [(tree(4, 6), (0, 16), "hyperbolic"), (cycle(8), (16, 0), "spherical"), (cycle(100), (8, 8), "flat"),
     (grid(40, 25), (8, 8), "flat")],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_trees_are_hyperbolic_short_cycles_spherical_long_ones_and_grids_flat(data, wanted, kind):
    found = search_signature(data)
    assert (found[:2], found.kind) == (wanted, kind)
    if kind == "spherical":  # 1 at the opposite node, 0 at the n - 2 others
        assert found.mean == pytest.approx(1 / 7, abs=1e-6)


def test_the_nearest_normal_distribution_wins():
    """By the whole formula, over all candidates."""
    from math import log

    def direct(mu, sigma, D=17):
        n, low, high = (D - 1) // 2, 0.5 * abs(mu), 5 * abs(mu)
        spread = {
            p: low + (high - low) * 2 * p / (D - 3) if p < n else high - (high - low) * (2 * p - D - 1) / (D - 3)
            for p in (range(n) if mu > 0 else range(n + 1, D))
        }
        kl = {p: log(s / sigma) + sigma**2 / (2 * s**2) - 0.5 for p, s in spread.items()}
        p = min(kl, key=kl.get)
        return D - 1 - p, p

    for mu in (-1.5, -0.4, 0.2, 0.9):
        for sigma in (0.01, 0.3, 0.9, 2.0, 20.0):
            assert nearest_signature(mu, sigma) == direct(mu, sigma)
    assert nearest_signature(-0.1, 3.0) == nearest_signature(0.1, 0.0) == (8, 8)
    with pytest.raises(ValueError, match="even"):
        nearest_signature(0.0, 1.0, dimension=15)


def test_the_command_prints_the_space_and_names_wrong_options(capsys):
    assert SearchSpace(data="tree:3:3").run(Screen()) == 0
    assert "(q, p) = (0, 16)" in capsys.readouterr().out
    for given in ({"data": "tree:1:1"}, {"data": "cycle:x"}, {"data": "cycle:5", "dimension": 7}):
        with pytest.raises(OptionError) as raised:
            SearchSpace(**given).run(Screen(quiet=True))
        assert raised.value.option == [*given][-1]
