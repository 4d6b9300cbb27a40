"""Small graphs, points of several signatures, and what is true of every point."""

from types import SimpleNamespace

import torch
from torch import Tensor

from linattn.models.graph.manifold import Split, restored

# (q, p) = (time, space): both parts, a hyperboloid, a sphere, and parts too narrow for a norm.
SIGNATURES = [(3, 4), (0, 5), (4, 0), (1, 1)]
CHANNELS = 6
TOLERANCE = 1e-10


def random_graph(num_nodes: int) -> SimpleNamespace:
    """An undirected graph without double edges, one node with a loop, the last one alone."""
    chosen = torch.rand(num_nodes, num_nodes).triu(1) > 0.6
    chosen[:, -1] = False
    chosen = chosen | chosen.T
    chosen[0, 0] = True
    return SimpleNamespace(x=torch.randn(num_nodes, CHANNELS), edge_index=chosen.nonzero().T)


def side_by_side(graphs: list[SimpleNamespace]) -> SimpleNamespace:
    """Graphs as one, with offsets: what PyTorch Geometric's loader makes of a list."""
    sizes = torch.tensor([0] + [graph.x.shape[0] for graph in graphs])
    ptr = sizes.cumsum(0)
    edges = torch.cat([graph.edge_index + start for graph, start in zip(graphs, ptr, strict=False)], 1)
    return SimpleNamespace(x=torch.cat([graph.x for graph in graphs]), edge_index=edges, ptr=ptr)


def random_points(signature: tuple[int, int], number: int, radius: float = 1.0) -> Split:
    q, p = signature
    return restored(torch.randn(number, q + 1), 0.8 * torch.randn(number, p), radius)


def inner(x: Tensor, y: Tensor, q: int) -> Tensor:
    """``<x, y>`` with q + 1 coordinates of time, written apart from the library's."""
    signs = torch.ones(x.shape[-1], dtype=x.dtype)
    signs[: q + 1] = -1
    return (x * y) @ signs


def check_on_manifold(x: Split, radius: float) -> None:
    r = torch.as_tensor(radius)
    assert (x.sphere.norm(dim=-1) - r).abs().max() < TOLERANCE
    y = x.joined()
    scale = y.square().sum(-1).clamp(min=1)  # the constraint is a difference of squares of this size
    assert ((inner(y, y, x.q) + r**2) / scale).abs().max() < TOLERANCE
    assert (x.sphere[:, 0] > 0).all() or x.q > 0


def dense_adjacency(graph: SimpleNamespace) -> Tensor:
    """``D^-1/2 (A + 1) D^-1/2`` by a full matrix, row i what node i takes in."""
    n = graph.x.shape[0]
    a = torch.zeros(n, n, dtype=graph.x.dtype)
    for source, target in graph.edge_index.T.tolist():
        a[target, source] = 1
    a.fill_diagonal_(1)
    degree = a.sum(1)
    return a / degree.sqrt()[:, None] / degree.sqrt()[None, :]


def close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == wanted.shape
    if not wanted.numel():
        return
    assert (got - wanted).abs().max() <= tolerance * max(1.0, float(wanted.detach().abs().max()))
