"""Graphs from files: Planetoid's pickles, npz files, edge lists; or generated, by name.

A pickle may call any function of any module. The reader here allows only what arrays, sparse matrices and dicts of
lists need; any other name raises before it is looked up. PyTorch Geometric's reader opens the same files without.
"""

import pickle
import re
from collections import defaultdict
from copyreg import _reconstructor  # type: ignore[attr-defined]
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
    "a folder with PyTorch Geometric's raw files of Planetoid, ind.NAME.*, in it or in its folder raw; an .npz file; "
    f"an edge list ({', '.join(EDGE_LISTS)}); a generated graph: tree:4:6, cycle:10, grid:32:32, random:1000:8, "
    "communities:1000:4"
)
PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
VALIDATION = 500  # nodes, those after the training nodes, in Planetoid's public split


def load_graph(source: str) -> GraphData:
    """Load the graph at ``source``; the kind of data is recognised by itself.

    ``source`` is a folder of raw files of PyTorch Geometric (Planetoid's), an ``.npz`` file, an edge list, or the name
    of a generated graph with its numbers: ``tree:4:6``, ``cycle:10``, ``grid:32:32``, ``random:1000:8``,
    ``communities:1000:4``.

    Example:
        >>> load_graph("cycle:5").edge_index.tolist()
        [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [1, 4, 0, 2, 1, 3, 2, 4, 0, 3]]
    """
    path = Path(source).expanduser()
    kind, *numbers = source.split(":")
    if kind in GENERATED and not path.exists():
        try:
            sizes = [int(number) for number in numbers]
            if min(sizes[:2], default=1) < 1:
                raise ValueError("sizes must be at least 1")
            return GENERATED[kind](*sizes)
        except (TypeError, ValueError) as error:
            raise OptionError("data", f"{source}: {error}. Such as tree:4:6 or cycle:10") from error
    if planetoid := [*path.glob("ind.*.graph"), *path.glob("raw/ind.*.graph")]:
        return load_planetoid(planetoid[0].parent, planetoid[0].name.split(".")[1])
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path)
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
    parts: dict[str, Any] = {part: read_pickle(folder / f"ind.{name}.{part}") for part in PARTS[:-1]}
    places = torch.tensor([int(line) for line in (folder / f"ind.{name}.test.index").read_text().split()])
    train, before = len(parts["y"]), len(parts["ally"])

    def rows(known: Any, tested: Any) -> Tensor:
        """The rows of ``known``, those of ``tested`` at their ``places``, and zeros between."""
        found = torch.zeros(int(places.max()) + 1, known.shape[1])
        for where, part in ((slice(before), known), (places, tested)):
            found[where] = torch.as_tensor(getattr(part, "toarray", lambda part=part: part)(), dtype=torch.float32)
        return found

    pairs = [(node, other) for node, others in parts["graph"].items() for other in others]
    x, y = rows(parts["allx"], parts["tx"]), rows(parts["ally"], parts["ty"]).argmax(1)
    data = GraphData.of_edges(x, torch.tensor(pairs).T, y=y, name=name)
    return data.with_masks(torch.arange(train), torch.arange(train, min(train + VALIDATION, before)), places)


def load_npz(path: Path) -> GraphData:
    """Load ``x``, ``edge_index`` and, if they are there, ``y`` and the three masks, as :class:`GraphData` has them."""
    if not is_zipfile(path):  # numpy would take it for a single array, or for a pickle
        raise ValueError(f"{path} is no archive, or a damaged one; expected an .npz file")
    with np.load(path, allow_pickle=False) as archive:
        if not {"x", "edge_index"} <= set(archive.files):
            raise ValueError(
                f"{path} must have x and edge_index (y, {', '.join(MASKS)}); has {', '.join(archive.files)}"
            )
        parts = {name: torch.from_numpy(archive[name]) for name in archive.files}
    y = parts.get("y")
    if y is not None and y.is_floating_point():
        raise TypeError(f"{path}: classes must be whole numbers, got {y.dtype}")
    masks: Any = {name: parts[name].bool() for name in MASKS if name in parts}
    labels = None if y is None else y.flatten().long()
    return GraphData.of_edges(parts["x"].float(), parts["edge_index"].long(), y=labels, name=path.stem, **masks)


def load_edge_list(path: Path) -> GraphData:
    """Load a graph from lines of two nodes, separated by spaces, tabs, commas or semicolons.

    Anything after them, such as a weight, is ignored. Lines that begin with ``#`` or ``%`` are comments. Nodes may have
    any names: numbers are sorted, other names keep the order in which they first appear. Nodes without an edge cannot
    be given. Features are ``default_features``.
    """
    pairs: list[list[str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.lstrip().startswith(("#", "%")):
            pairs.append(re.split(r"[\s,;]+", line.strip())[:2])
            if len(pairs[-1]) < 2:
                raise ValueError(f"{path}, line {number}: expected two nodes, got {line.strip()!r}")
    if not pairs:
        raise ValueError(f"{path} has no edges: expected two nodes a line")
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        names.sort(key=int)
    place = {name: i for i, name in enumerate(names)}
    edges = torch.tensor([[place[name] for name in pair] for pair in pairs]).T
    return GraphData.of_edges(None, edges, len(names), name=path.stem)


def read_pickle(path: Path) -> Any:
    """Read a pickle of an array, a sparse matrix, or a dict of lists."""
    with path.open("rb") as file:
        try:
            return _Reader(file, encoding="latin1").load()  # most copies go back to files written by Python 2
        except Exception as error:  # a damaged file fails in many ways
            raise ValueError(f"{path} is no pickle of an array, a sparse matrix or a dict: {error}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for, whatever module it is said to be in: that depends on the versions that wrote it."""
        from scipy.sparse import csr_matrix

        allowed = {
            "ndarray": np.ndarray, "dtype": np.dtype, "csr_matrix": csr_matrix, "defaultdict": defaultdict,
            "_reconstruct": np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
            "encode": lambda text, _: text.encode("latin1"), "object": object, "list": list,
            "_reconstructor": _reconstructor,
        }  # fmt: skip
        if name not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not opened")
        return allowed[name]
