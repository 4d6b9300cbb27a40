"""Generated graphs: trees have negative curvature, short cycles positive, grids and long cycles hardly any; communities
have classes that can be learned."""

from collections.abc import Callable

import torch

from linattn.lab.tasks.graph.data import GraphData


def tree(branches: int = 4, depth: int = 6) -> GraphData:
    """The complete tree with ``branches`` children at each inner node and leaves ``depth`` edges from the root.

    Nodes are numbered level by level: the parent of node i > 0 is ``(i - 1) // branches``.

    Example:
        >>> tree(4, 6).num_nodes
        5461
    """
    nodes = sum(branches**level for level in range(depth + 1))
    children = torch.arange(1, nodes)
    edges = torch.stack(((children - 1) // branches, children))
    return GraphData.of_edges(None, edges, nodes, name=f"tree-{branches}-{depth}")


def cycle(nodes: int = 10) -> GraphData:
    """A cycle of ``nodes`` nodes."""
    here = torch.arange(nodes)
    return GraphData.of_edges(None, torch.stack((here, (here + 1) % nodes)), nodes, name=f"cycle-{nodes}")


def grid(rows: int = 32, columns: int = 32) -> GraphData:
    """A grid of ``rows x columns`` nodes, each connected to the four next to it."""
    place = torch.arange(rows * columns).reshape(rows, columns)
    across = torch.stack((place[:, :-1].flatten(), place[:, 1:].flatten()))
    down = torch.stack((place[:-1].flatten(), place[1:].flatten()))
    return GraphData.of_edges(None, torch.cat((across, down), 1), rows * columns, name=f"grid-{rows}-{columns}")


def random_graph(nodes: int = 1000, degree: int = 8, seed: int = 0) -> GraphData:
    """Edges between random nodes, ``degree`` for each node on average (a little less, as repeated edges count once)."""
    edges = torch.randint(nodes, (2, nodes * degree // 2), generator=torch.Generator().manual_seed(seed))
    return GraphData.of_edges(None, edges, nodes, name=f"random-{nodes}-{degree}")


def communities(
    nodes: int = 1000, classes: int = 4, degree: int = 8, *, within: float = 0.8, features: int = 16,
    signal: float = 1.0, seed: int = 0,
) -> GraphData:  # fmt: skip
    """Nodes of ``classes`` classes; a share ``within`` of the edges connects nodes of one class, the others any nodes.

    Features are normal noise plus ``signal`` times a normal vector of the node's class.
    """
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % classes
    first = torch.randint(nodes, (nodes * degree // 2,), generator=draw)
    anyone = torch.randint(nodes, first.shape, generator=draw)
    # The node of the class of ``first`` in the block of ``anyone``; the last block may be cut short.
    same = (anyone // classes * classes + y[first]).clamp(max=nodes - 1)
    inside = torch.rand(first.shape, generator=draw) < within
    centres = torch.randn(classes, features, generator=draw)
    x = torch.randn(nodes, features, generator=draw) + signal * centres[y]
    edges = torch.stack((first, torch.where(inside, same, anyone)))
    return GraphData.of_edges(x, edges, y=y, name=f"communities-{nodes}-{classes}")


GENERATED: dict[str, Callable[..., GraphData]] = {
    "tree": tree, "cycle": cycle, "grid": grid, "random": random_graph, "communities": communities,
}  # fmt: skip
