"""Readers against files that were written by hand."""

import os
import pickle

import numpy as np
import pytest
import torch
from tests.lab.tasks.graph.raw_files import write_planetoid

from linattn.lab.tasks.graph.data import GraphData, both_ways
from linattn.lab.tasks.graph.files import load_graph, read_pickle
from linattn.support.options import OptionError


def edges_of(pairs: np.ndarray, nodes: int) -> torch.Tensor:
    return both_ways(torch.from_numpy(np.ascontiguousarray(pairs)), nodes)


@pytest.mark.parametrize("place", ["", "raw"])
def test_planetoid_places_every_node_edge_and_mask(tmp_path, place):
    truth = write_planetoid(tmp_path / place)
    data = load_graph(str(tmp_path))
    assert torch.equal(data.x, torch.from_numpy(truth["x"]))
    assert torch.equal(data.y, torch.from_numpy(truth["y"]))
    assert torch.equal(data.edge_index, edges_of(truth["pairs"], 13))
    nodes = {name: getattr(data, name).nonzero().flatten().tolist() for name in ("train_mask", "val_mask", "test_mask")}
    assert nodes == {"train_mask": [0, 1, 2], "val_mask": list(range(3, 10)), "test_mask": [10, 12]}
    assert (data.name, data.num_classes) == ("tiny", 3)


def test_a_missing_part_is_named(tmp_path):
    write_planetoid(tmp_path)
    (tmp_path / "ind.tiny.ty").unlink()
    with pytest.raises(ValueError, match=r"lacks ind\.tiny\.ty"):
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


def test_an_instance_of_another_class_is_refused(tmp_path):
    (tmp_path / "bad").write_bytes(b"ccopy_reg\n_reconstructor\n(cnumpy\nndarray\nc__builtin__\nobject\nNtR.")
    with pytest.raises(ValueError, match="no pickle of an array"):
        read_pickle(tmp_path / "bad")


def test_three_layouts_of_npz_are_one_graph(tmp_path):
    truth = write_planetoid(tmp_path / "raw")
    x, y, pairs = truth["x"], truth["y"], truth["pairs"]
    directed = np.concatenate((pairs, pairs[:, :1], [[4], [4]]), 1)  # a repeat and a loop
    masks = np.stack([np.arange(13) < 4, np.arange(13) >= 9])
    np.savez(tmp_path / "plain.npz", x=x, y=y, edge_index=directed, train_mask=masks[0])
    np.savez(tmp_path / "rows.npz", node_features=x, node_labels=y, edges=directed.T, train_masks=masks)
    order = np.lexsort((directed[1], directed[0]))
    first = directed[0][order]
    rows, columns = x.nonzero()
    np.savez(
        tmp_path / "compressed.npz",
        adj_data=np.ones(len(first)), adj_indices=directed[1][order].astype("int32"),
        adj_indptr=np.searchsorted(first, np.arange(14)), adj_shape=(13, 13), labels=y,
        attr_data=x[rows, columns], attr_indices=columns, attr_indptr=np.searchsorted(rows, np.arange(14)),
        attr_shape=x.shape,
    )  # fmt: skip
    for name in ("plain", "rows", "compressed"):
        data = load_graph(str(tmp_path / f"{name}.npz"), split=1 if name == "rows" else 0)
        assert torch.equal(data.x, torch.from_numpy(x)), name
        assert torch.equal(data.y, torch.from_numpy(y)), name
        assert torch.equal(data.edge_index, edges_of(pairs, 13)), name
        if name != "compressed":
            assert data.train_mask.tolist() == masks[int(name == "rows")].tolist()


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
    with pytest.raises(OptionError, match="nodes must be at least 3"):
        load_graph("cycle:2")
    with pytest.raises(ValueError, match=r"within 0\.\.2"):
        GraphData(torch.eye(3), torch.tensor([[0], [3]]))
