"""Random directed acyclic graphs, many at once, each with a random order of its nodes."""

from typing import NamedTuple

import numpy as np

from linattn.lab.tasks.synthetic.ragged import Flags, Floats, Ints, below

MOST = 4  # the most parents, and the most children, of a node


class Graphs(NamedTuple):
    """M graphs of at most N nodes; nodes are numbered after their parents.

    Attributes:
        sizes: ``n (M,)``.
        parents: ``(M, N, 4)``, -1 where there are fewer.
        times: ``(M, N)``. In their order a node comes after its parents, and all nodes that may come next are equally
            likely: a node is ready when its last parent has come, and then waits for an exponentially distributed time.
    """

    sizes: Ints
    parents: Ints
    times: Floats

    def ancestors(self, nodes: Ints) -> Flags:
        """Flags ``(M, N)`` of ``nodes[m]`` itself and all nodes that it depends on."""
        number, most = self.times.shape
        found = np.zeros((number, most + 1), np.bool_)  # the last column is for parents of -1, which are none
        found[np.arange(number), nodes] = True
        for node in range(most - 1, 0, -1):
            rows = np.nonzero(found[:, node])[0]
            found[rows[:, None], self.parents[rows, node]] = True
        return found[:, :most]


def random_graphs(rng: np.random.Generator, sizes: Ints) -> Graphs:
    """Draw graphs with ``L ~ U{1 .. (n - 1) // 4 + 1}`` leaves; every later node takes ``U{1 .. min(4, available)}``
    parents among earlier nodes with fewer than four children.

    All graphs grow by one node at a time. ``free[m, : left[m]]`` are the nodes of graph m that may become parents, in
    any order: chosen ones are exchanged with the last ones, where they are easily removed.
    """
    number, most = len(sizes), int(sizes.max())
    order = np.argsort(-sizes, kind="stable")  # so that graphs that still grow come first
    sizes = sizes[order]
    leaves = 1 + below(rng, (sizes - 1) // 4 + 1)
    growing = np.searchsorted(-sizes, -np.arange(most))  # how many graphs have more than 0, 1, 2 ... nodes
    # Node i of graph m has index m N + i in all these arrays: one index is several times as fast as two.
    row = np.arange(number) * most
    free = (row[:, None] + np.arange(most)).ravel()
    left, children = leaves.copy(), np.zeros(number * most, np.int8)
    parents, times = np.full((number * most, MOST), -1), rng.standard_exponential(number * most)
    for node in range(1, most):
        rows = np.nonzero(leaves[: growing[node]] <= node)[0]
        offset, available = row[rows], left[rows]
        wanted = 1 + below(rng, np.minimum(MOST, available))
        start, taken = np.zeros(len(rows)), []
        for j in range(MOST):
            some = np.nonzero(wanted > j)[0]
            own, last = offset[some], available[some] - 1 - j
            place, end = own + below(rng, last + 1), own + last
            parent = free[place]
            free[place] = free[end]
            free[end] = parent
            parents[own + node, j] = parent - own
            children[parent] += 1
            start[some] = np.maximum(start[some], times[parent])
            taken.append((some, end, parent))
        kept = available
        for some, place, parent in taken:
            full = children[parent] == MOST
            some, place = some[full], place[full]
            kept[some] -= 1
            free[place] = free[offset[some] + kept[some]]
        times[offset + node] += start
        free[offset + kept] = offset + node
        left[rows] = kept + 1
    back = np.empty(number, np.int64)
    back[order] = np.arange(number)
    return Graphs(sizes[back], parents.reshape(number, most, MOST)[back], times.reshape(number, most)[back])
