"""Readers against files that were written by hand, Planetoid's as Python 2 wrote them."""

import os
import pickle
from collections import defaultdict

import numpy as np
import pytest
import torch

from linattn.lab.tasks.graph.data import GraphData, both_ways
from linattn.lab.tasks.graph.files import load_graph, read_pickle
from linattn.support.options import OptionError


def edges_of(pairs, nodes):
    return both_ways(torch.from_numpy(np.ascontiguousarray(pairs)), nodes)


def sparse(matrix):
    """A pickle of protocol 2 that names scipy's class without importing scipy, with Python 2's names."""
    rows, columns = matrix.nonzero()
    state = {
        "data": matrix[rows, columns].astype(np.float32),
        "indices": columns.astype(np.int32),
        "indptr": np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int32),
        "_shape": matrix.shape,
    }
    body = pickle.dumps(state, protocol=2)[2:-1]  # without the opcodes of begin and end
    return b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81" + body + b"b."


def write_planetoid(folder):
    """13 nodes: 3 to train, 7 others before the test nodes, which are 12 and 10; 11 is not there. Returns the truth."""
    draw = np.random.default_rng(0)
    x = np.round(draw.random((13, 5)) * (draw.random((13, 5)) < 0.6), 3).astype(np.float32)
    y = draw.integers(0, 3, 13)
    x[11], y[11] = 0, 0
    one_hot = np.eye(3, dtype=np.int32)[y]
    places = np.array([12, 10])  # in the order of tx, not sorted
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"x": (slice(0, 3), "y"), "allx": (slice(0, 10), "ally"), "tx": (places, "ty")}
    for features, (chosen, labels) in parts.items():
        (folder / f"ind.tiny.{features}").write_bytes(sparse(x[chosen]))
        (folder / f"ind.tiny.{labels}").write_bytes(pickle.dumps(one_hot[chosen], protocol=2))
    # A repeat (0-1 twice), a loop (3-3) and an edge that is written in one direction only (4-12).
    graph = {0: [1, 1, 2], 1: [0], 2: [0, 5], 3: [3, 10], 4: [12], 5: [2], 10: [3], 12: []}
    (folder / "ind.tiny.graph").write_bytes(pickle.dumps(defaultdict(list, graph), protocol=2, fix_imports=True))
    (folder / "ind.tiny.test.index").write_text("12\n10\n")
    return x, y, np.array([[0, 0, 2, 3, 4], [1, 2, 5, 10, 12]])


@pytest.mark.parametrize("place", ["", "raw"])
def test_planetoid_places_every_node_edge_and_mask(tmp_path, place):
    x, y, pairs = write_planetoid(tmp_path / place)
    data = load_graph(str(tmp_path))
    assert torch.equal(data.x, torch.from_numpy(x))
    assert torch.equal(data.y, torch.from_numpy(y))
    assert torch.equal(data.edge_index, edges_of(pairs, 13))
    nodes = [getattr(data, f"{part}_mask").nonzero().flatten().tolist() for part in ("train", "val", "test")]
    assert nodes == [[0, 1, 2], list(range(3, 10)), [10, 12]]
    assert (data.name, data.num_classes) == ("tiny", 3)
    (tmp_path / place / "ind.tiny.ty").unlink()
    with pytest.raises(FileNotFoundError, match=r"ind\.tiny\.ty"):
        load_graph(str(tmp_path))


class Call:
    """Pickled, it calls a function when it is opened."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("nested", [False, True])
def test_a_pickle_cannot_call_anything(tmp_path, nested):
    call = Call(tmp_path / "made")
    (tmp_path / "bad").write_bytes(pickle.dumps({0: [call]} if nested else call))
    with pytest.raises(ValueError, match=r"names \w+\.mkdir"):
        read_pickle(tmp_path / "bad")
    assert not (tmp_path / "made").exists()


def test_npz_files_have_the_names_of_a_graph(tmp_path):
    x, y, pairs = write_planetoid(tmp_path)
    directed = np.concatenate((pairs, pairs[:, :1], [[4], [4]]), 1)  # a repeat and a loop
    path = tmp_path / "plain.npz"
    np.savez(path, x=x, y=y[:, None].astype(np.int32), edge_index=directed, train_mask=np.arange(13) < 4)
    data = load_graph(str(path))
    assert (data.x.tolist(), data.y.tolist(), data.name) == (x.tolist(), y.tolist(), "plain")
    assert torch.equal(data.edge_index, edges_of(pairs, 13))
    assert data.train_mask.tolist() == [n < 4 for n in range(13)]
    np.savez(path, x=x, y=y.astype(float), edge_index=directed)
    with pytest.raises(TypeError, match="classes must be whole numbers"):
        load_graph(str(path))
    np.savez(path, x=x)
    with pytest.raises(ValueError, match=r"must have x and edge_index .*; has x"):
        load_graph(str(path))
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match="no archive"):
        load_graph(str(path))


def test_an_edge_list_keeps_numbers_in_order_and_takes_names(tmp_path):
    (tmp_path / "a.txt").write_text("# nodes\n10 2 0.5\n\n2,7\n7\t10\n2 10\n2 2\n")
    data = load_graph(str(tmp_path / "a.txt"))
    assert torch.equal(data.edge_index, edges_of(np.array([[0, 0, 1], [1, 2, 2]]), 3))  # 2, 7, 10
    assert torch.equal(data.x, torch.eye(3))
    (tmp_path / "b.csv").write_text("ann;bob\nbob;cid\n")
    assert load_graph(str(tmp_path / "b.csv")).edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    (tmp_path / "c.txt").write_text("1 2\n3\n")
    with pytest.raises(ValueError, match="line 2: expected two nodes"):
        load_graph(str(tmp_path / "c.txt"))


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(OptionError, match=r"does not exist.*edge list"):
        load_graph(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="sizes must be at least 1"):
        load_graph("cycle:0")
    with pytest.raises(ValueError, match=r"within 0\.\.2"):
        GraphData(torch.eye(3), torch.tensor([[0], [3]]))
