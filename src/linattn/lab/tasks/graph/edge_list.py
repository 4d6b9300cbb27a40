"""Edge lists: text files with one edge in each line."""

import re
from pathlib import Path

import torch

from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.features import default_features

SUFFIXES = (".txt", ".edges", ".edgelist", ".csv", ".tsv", ".el")
COMMENTS = ("#", "%")


def load_edge_list(path: Path) -> GraphData:
    """Load a graph from lines of two nodes, separated by spaces, tabs, commas or semicolons.

    Anything after them, such as a weight, is ignored. Lines that begin with ``#`` or ``%`` are comments. Nodes may have
    any names: numbers are sorted, other names keep the order in which they first appear. Nodes without an edge cannot
    be given. Features are :func:`default_features`.
    """
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(COMMENTS):
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
    return GraphData.of_edges(default_features(edges, len(names)), edges, name=path.stem)
