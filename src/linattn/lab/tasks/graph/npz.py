"""Graphs in npz files of three layouts."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from linattn.lab.tasks.graph.data import MASKS, GraphData
from linattn.lab.tasks.graph.unpickling import dense_rows
from linattn.support.extras import need

LAYOUTS = (
    "x, edge_index (y, train_mask, val_mask, test_mask); "
    "node_features, edges (node_labels, train_masks, val_masks, test_masks: one row a split); "
    "adj_indices, adj_indptr, adj_shape with attr_data, attr_indices, attr_indptr, attr_shape or attr_matrix (labels)"
)


def load_graph_npz(path: Path, split: int = 0) -> GraphData:
    """Load the graph in ``path``; ``split`` is the row of masks to take if the file has several.

    The layout is recognised by the keys: the names of :class:`GraphData`; the keys of the heterophilous data sets
    (roman-empire and others); or compressed rows, as in the Amazon, Coauthor and CitationFull data sets. PyTorch
    Geometric has the last two as raw files. Pickles inside a file are not opened.
    """
    need("reading .npz files", "numpy")
    import numpy

    if not is_zipfile(path):  # numpy would take it for a single array, or for a pickle
        raise ValueError(f"{path} is no archive, or a damaged one; expected an .npz file")
    with numpy.load(path, allow_pickle=False) as archive:
        keys = set(archive.files)
        wanted = {"x": {"x", "edge_index"}, "node_features": {"node_features", "edges"}}
        if wanted["x"] <= keys:
            return _plain(path, archive, keys)
        if wanted["node_features"] <= keys:
            return _with_splits(path, archive, keys, split)
        if {"adj_indices", "adj_indptr", "adj_shape"} <= keys:
            return _compressed(path, archive, keys)
    raise ValueError(f"{path} must have the keys of one of these layouts: {LAYOUTS}; found {', '.join(sorted(keys))}")


def _plain(path: Path, archive: Any, keys: set[str]) -> GraphData:
    others = {name: torch.from_numpy(archive[name]).bool() for name in MASKS if name in keys}
    return _graph(path, archive["x"], archive["edge_index"], archive["y"] if "y" in keys else None, others)


def _with_splits(path: Path, archive: Any, keys: set[str], split: int) -> GraphData:
    others = {}
    for name in MASKS:
        if f"{name}s" in keys:
            rows = archive[f"{name}s"]
            if not 0 <= split < len(rows):
                raise ValueError(f"split must be within 0..{len(rows) - 1}, the splits of {path}, got {split}")
            others[name] = torch.from_numpy(rows[split]).bool()
    labels = archive["node_labels"] if "node_labels" in keys else None
    return _graph(path, archive["node_features"], archive["edges"].T, labels, others)


def _compressed(path: Path, archive: Any, keys: set[str]) -> GraphData:
    import numpy

    nodes = int(archive["adj_shape"][0])
    first = numpy.repeat(numpy.arange(nodes), numpy.diff(archive["adj_indptr"]))
    edges = numpy.stack((first, archive["adj_indices"].astype("int64")))
    if "attr_matrix" in keys:
        x = archive["attr_matrix"]
    elif "attr_indptr" in keys:
        shape = (int(archive["attr_shape"][0]), int(archive["attr_shape"][1]))
        x = dense_rows(archive["attr_data"], archive["attr_indices"], archive["attr_indptr"], shape)
    else:
        raise ValueError(f"{path} has edges and no features: expected attr_matrix, or attr_data with its indices")
    return _graph(path, x, edges, archive["labels"] if "labels" in keys else None, {})


def _graph(path: Path, x: Any, edges: Any, y: Any, others: dict[str, Tensor]) -> GraphData:
    if y is not None and y.dtype.kind not in "iu":
        raise TypeError(f"{path}: classes must be whole numbers, got {y.dtype}")
    return GraphData.of_edges(
        torch.from_numpy(x.astype("float32")),
        torch.from_numpy(edges.astype("int64")),
        y=None if y is None else torch.from_numpy(y.reshape(-1).astype("int64")),
        name=path.stem,
        **others,
    )
