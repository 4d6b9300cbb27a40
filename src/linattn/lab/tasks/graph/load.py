"""Loads graphs of every kind."""

from collections.abc import Callable
from pathlib import Path

from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.edge_list import SUFFIXES, load_edge_list
from linattn.lab.tasks.graph.generated import communities, cycle, grid, random_graph, tree
from linattn.lab.tasks.graph.npz import load_graph_npz
from linattn.lab.tasks.graph.planetoid import find_planetoid, load_planetoid
from linattn.support.options import OptionError

GENERATED: dict[str, Callable[..., GraphData]] = {
    "tree": tree,
    "cycle": cycle,
    "grid": grid,
    "random": random_graph,
    "communities": communities,
}
SOURCES = (
    "a folder of PyTorch Geometric's raw files (ind.NAME.*, or one .npz file; in it or in its folder raw); an .npz "
    f"file; an edge list ({', '.join(SUFFIXES)}); a generated graph: tree:4:6, cycle:10, grid:32:32, random:1000:8, "
    "communities:1000:4"
)


def load_graph(source: str, *, split: int = 0) -> GraphData:
    """Load the graph at ``source``; the kind of data is recognised by itself.

    Args:
        source: a folder of raw files of PyTorch Geometric (Planetoid's, or one npz file), an ``.npz`` file, an edge
            list, or the name of a generated graph with its numbers: ``tree:4:6``, ``cycle:10``, ``grid:32:32``,
            ``random:1000:8``, ``communities:1000:4``.
        split: which row of masks to take if an npz file has several.

    Example:
        >>> from linattn.lab.tasks.graph import load_graph
        >>> load_graph("cycle:5").edge_index.tolist()
        [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [1, 4, 0, 2, 1, 3, 2, 4, 0, 3]]
    """
    path = Path(source).expanduser()
    kind, *numbers = source.split(":")
    if kind in GENERATED and not path.exists():
        return _generated(source, kind, numbers)
    if path.is_dir():
        planetoid = find_planetoid(path)
        if planetoid is not None:
            return load_planetoid(*planetoid)
        archives = [found for place in (path, path / "raw") for found in sorted(place.glob("*.npz"))]
        if len(archives) == 1:
            return load_graph_npz(archives[0], split)
    if path.is_file() and path.suffix == ".npz":
        return load_graph_npz(path, split)
    if path.is_file() and path.suffix in SUFFIXES:
        return load_edge_list(path)
    what = "is there, but not one of these" if path.exists() else "does not exist"
    raise OptionError("data", f"{source} {what}. Looked for {SOURCES}")


def _generated(source: str, kind: str, numbers: list[str]) -> GraphData:
    try:
        return GENERATED[kind](*map(int, numbers))
    except (TypeError, ValueError) as error:
        raise OptionError("data", f"{source}: {error}. Such as tree:4:6 or cycle:10") from error
