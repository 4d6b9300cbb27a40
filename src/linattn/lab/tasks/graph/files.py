"""Graphs from files: Planetoid's pickles, npz files of three layouts, edge lists; or generated, by name.

A pickle may call any function of any module. The reader here allows only the names that arrays, sparse matrices and
dicts of lists need; any other raises before it is looked up. PyTorch Geometric's reader opens the same files without.
"""

import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from linattn.lab.tasks.graph.data import MASKS, GraphData
from linattn.lab.tasks.graph.generated import GENERATED
from linattn.support.options import OptionError

EDGE_LISTS = (".txt", ".edges", ".edgelist", ".csv", ".tsv", ".el")
SOURCES = (
    "a folder of PyTorch Geometric's raw files (ind.NAME.*, or one .npz file; in it or in its folder raw); an .npz "
    f"file; an edge list ({', '.join(EDGE_LISTS)}); a generated graph: tree:4:6, cycle:10, grid:32:32, random:1000:8, "
    "communities:1000:4"
)
LAYOUTS = (
    "x, edge_index (y, train_mask, val_mask, test_mask); "
    "node_features, edges (node_labels, train_masks, val_masks, test_masks: one row a split); "
    "adj_indices, adj_indptr, adj_shape with attr_data, attr_indices, attr_indptr, attr_shape or attr_matrix (labels)"
)
PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
VALIDATION = 500  # nodes, those after the training nodes, in Planetoid's public split


def load_graph(source: str, *, split: int = 0) -> GraphData:
    """Load the graph at ``source``; the kind of data is recognised by itself.

    Args:
        source: a folder of raw files of PyTorch Geometric (Planetoid's, or one npz file), an ``.npz`` file, an edge
            list, or the name of a generated graph with its numbers: ``tree:4:6``, ``cycle:10``, ``grid:32:32``,
            ``random:1000:8``, ``communities:1000:4``.
        split: which row of masks to take if an npz file has several.

    Example:
        >>> load_graph("cycle:5").edge_index.tolist()
        [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [1, 4, 0, 2, 1, 3, 2, 4, 0, 3]]
    """
    path = Path(source).expanduser()
    kind, *numbers = source.split(":")
    if kind in GENERATED and not path.exists():
        try:
            return GENERATED[kind](*map(int, numbers))
        except (TypeError, ValueError) as error:
            raise OptionError("data", f"{source}: {error}. Such as tree:4:6 or cycle:10") from error
    if path.is_dir():
        places = [place for place in (path, path / "raw") if place.is_dir()]
        if planetoid := [found for place in places for found in sorted(place.glob("ind.*.graph"))]:
            return load_planetoid(planetoid[0].parent, planetoid[0].name.split(".")[1])
        archives = [found for place in places for found in sorted(place.glob("*.npz"))]
        if len(archives) == 1:
            return load_npz(archives[0], split)
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path, split)
    if path.is_file() and path.suffix in EDGE_LISTS:
        return load_edge_list(path)
    what = "is there, but not one of these" if path.exists() else "does not exist"
    raise OptionError("data", f"{source} {what}. Looked for {SOURCES}")


def load_planetoid(folder: Path, name: str) -> GraphData:
    """Load ``ind.NAME.{x, y, tx, ty, allx, ally, graph, test.index}`` from ``folder``: Cora, Citeseer, PubMed.

    Nodes are those of ``allx``, then those of ``tx`` at the indices in ``test.index``. Nodes at indices that it skips
    (the isolated nodes of Citeseer) have zero features and class 0, and are in no split. Training nodes are those of
    ``x``, validation nodes the next 500, test nodes those of ``test.index``.
    """
    missing = [part for part in PARTS if not (folder / f"ind.{name}.{part}").is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(f'ind.{name}.{part}' for part in missing)}")
    parts: dict[str, Any] = {part: read_pickle(folder / f"ind.{name}.{part}") for part in PARTS[:-1]}
    places = torch.tensor([int(line) for line in (folder / f"ind.{name}.test.index").read_text().split()])
    train, before = len(parts["y"]), len(parts["ally"])
    x, one_hot = (
        _rows(parts[known], before, parts[tested], places) for known, tested in (("allx", "tx"), ("ally", "ty"))
    )
    counts = torch.tensor([len(others) for others in parts["graph"].values()])
    first = torch.tensor(list(parts["graph"])).repeat_interleave(counts)
    edges = torch.stack((first, torch.tensor([node for others in parts["graph"].values() for node in others])))
    data = GraphData.of_edges(x, edges, y=one_hot.argmax(1), name=name)
    return data.with_masks(torch.arange(train), torch.arange(train, min(train + VALIDATION, before)), places)


def _rows(known: Any, before: int, tested: Any, places: Tensor) -> Tensor:
    """The first ``before`` rows from ``known``, those at ``places`` from ``tested``, and zeros between."""
    first, others = (
        torch.as_tensor(part.dense() if isinstance(part, SparseRows) else part, dtype=torch.float32)
        for part in (known, tested)
    )
    rows = torch.zeros(int(places.max()) + 1, first.shape[1])
    rows[:before], rows[places] = first, others
    return rows


def load_npz(path: Path, split: int = 0) -> GraphData:
    """Load the graph in ``path``; ``split`` is the row of masks to take if the file has several.

    The layout is recognised by the keys: the names of :class:`GraphData`; the keys of the heterophilous data sets
    (roman-empire and others); or compressed rows, as in the Amazon, Coauthor and CitationFull data sets. PyTorch
    Geometric has the last two as raw files. Pickles inside a file are not opened.
    """
    if not is_zipfile(path):  # numpy would take it for a single array, or for a pickle
        raise ValueError(f"{path} is no archive, or a damaged one; expected an .npz file")
    with np.load(path, allow_pickle=False) as archive:
        keys = set(archive.files)

        def part(name: str) -> Any:
            return archive[name] if name in keys else None

        if {"x", "edge_index"} <= keys:
            x, edges, y = part("x"), part("edge_index"), part("y")
        elif {"node_features", "edges"} <= keys:
            x, edges, y = part("node_features"), part("edges").T, part("node_labels")
        elif {"adj_indices", "adj_indptr", "adj_shape"} <= keys and keys & {"attr_matrix", "attr_indptr"}:
            first = np.repeat(np.arange(int(part("adj_shape")[0])), np.diff(part("adj_indptr")))
            edges, x, y = np.stack((first, part("adj_indices").astype("int64"))), part("attr_matrix"), part("labels")
            if x is None:
                x = dense_rows(*(part(f"attr_{name}") for name in ("data", "indices", "indptr", "shape")))
        else:
            found = ", ".join(sorted(keys))
            raise ValueError(f"{path} must have the keys of one of these layouts: {LAYOUTS}; found {found}")
        masks: dict[str, Any] = {name: part(name) for name in MASKS if name in keys}
        for name in MASKS:
            if (rows := part(f"{name}s")) is not None:
                if not 0 <= split < len(rows):
                    raise ValueError(f"split must be within 0..{len(rows) - 1}, the splits of {path}, got {split}")
                masks[name] = rows[split]
    if y is not None and y.dtype.kind not in "iu":
        raise TypeError(f"{path}: classes must be whole numbers, got {y.dtype}")
    return GraphData.of_edges(
        torch.from_numpy(x.astype("float32")),
        torch.from_numpy(edges.astype("int64")),
        y=None if y is None else torch.from_numpy(y.reshape(-1).astype("int64")),
        name=path.stem,
        **{name: torch.from_numpy(mask).bool() for name, mask in masks.items()},  # type: ignore[arg-type]
    )


def load_edge_list(path: Path) -> GraphData:
    """Load a graph from lines of two nodes, separated by spaces, tabs, commas or semicolons.

    Anything after them, such as a weight, is ignored. Lines that begin with ``#`` or ``%`` are comments. Nodes may have
    any names: numbers are sorted, other names keep the order in which they first appear. Nodes without an edge cannot
    be given. Features are ``default_features``.
    """
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", "%")):
            continue
        parts = re.split(r"[\s,;]+", line.strip())
        if len(parts) < 2:
            raise ValueError(f"{path}, line {number}: expected two nodes, got {line.strip()!r}")
        pairs.append((parts[0], parts[1]))
    if not pairs:
        raise ValueError(f"{path} has no edges: expected two nodes a line")
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        names.sort(key=int)
    place = {name: i for i, name in enumerate(names)}
    edges = torch.tensor([[place[a] for a, _ in pairs], [place[b] for _, b in pairs]])
    return GraphData.of_edges(None, edges, len(names), name=path.stem)


class SparseRows:
    """A matrix in compressed rows, as scipy pickles it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rows = state["data"], state["indices"], state["indptr"], state.get("_shape") or state["shape"]

    def dense(self) -> Any:
        return dense_rows(*self.rows)


def dense_rows(data: Any, indices: Any, indptr: Any, shape: Any) -> Any:
    """The float32 matrix ``(rows, columns)`` from compressed rows."""
    rows, columns = map(int, shape)
    matrix = np.zeros((rows, columns), dtype=np.float32)
    matrix[np.repeat(np.arange(rows), np.diff(indptr)), indices] = data
    return matrix


def read_pickle(path: Path) -> Any:
    """Read a pickle of an array, a :class:`SparseRows`, or a dict of lists."""
    with path.open("rb") as file:
        try:
            return _Reader(file, path).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path} is no pickle of an array, a sparse matrix or a dict, or is damaged") from error


def _reconstruct(cls: type, base: type, state: object) -> object:
    """Rebuild an instance of a class as pickled by Python 2; the only class allowed is a sparse matrix."""
    if cls is not SparseRows:
        raise pickle.UnpicklingError(f"may hold no {cls.__name__}")
    return SparseRows()


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Rebuild bytes that Python 3 pickled in an old protocol."""
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("scipy.sparse.csr", "csr_matrix"): SparseRows,
    ("scipy.sparse._csr", "csr_matrix"): SparseRows,
    ("collections", "defaultdict"): defaultdict,
    ("_codecs", "encode"): _latin1,
    **{
        (module, name): kind
        for module in ("builtins", "__builtin__")
        for name, kind in (("object", object), ("list", list))
    },
    **{(module, "_reconstructor"): _reconstruct for module in ("copyreg", "copy_reg")},  # in Python 3, and in 2
}


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file, encoding="latin1")  # most copies go back to files written by Python 2
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(
                f"{self.path} names {module}.{name}, which is no part of an array, a sparse matrix or a dict of lists; "
                "it is not opened"
            )
        return _ALLOWED[module, name]
