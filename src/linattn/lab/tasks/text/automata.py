"""Random automata and walks through them, many at once, and a test of which automata are the same."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from linattn.lab.tasks.text.draws import choose, distinct, whole

Range = tuple[int, int]


def random_automata(
    generator: torch.Generator, count: int, symbols: int, nodes: Range, alphabet: Range, edges: Range
) -> Tensor:
    """Random tables ``(count, max nodes, symbols)``: the node that a symbol leads to, -1 where it is not allowed.

    Numbers of nodes, of letters in the alphabet and of edges at a node are uniform in the ranges, ends included. Each
    automaton has its own alphabet among the ``symbols``. The edges of a node have distinct symbols and lead to distinct
    other nodes. All automata start at node 0.
    """
    high, most = nodes[1], edges[1]
    sizes = whole(generator, *nodes, count)
    letters = choose(generator, count, symbols, symbols) < whole(generator, *alphabet, count, 1)
    node = torch.arange(high)
    allowed = (node < sizes[:, None])[:, None] & (node != node[:, None])  # (count, from, to)
    to = distinct(generator, count * high, allowed.flatten(0, 1).double(), most)
    by = distinct(generator, count * high, letters.double().repeat_interleave(high, 0), most)
    kept = torch.arange(most) < whole(generator, *edges, count * high, 1)
    table = torch.full((count * high, symbols), -1)
    table.scatter_(1, by, to.masked_fill(~kept, -1))
    return table.view(count, high, symbols).masked_fill((node >= sizes[:, None])[..., None], -1)


def canonical(table: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The smallest automaton that allows the same sequences, with nodes in the order in which they are first reached.

    Two tables give the same result if and only if they allow the same sequences, however their nodes are numbered.
    """
    rows = [{symbol: to for symbol, to in enumerate(row) if to >= 0} for row in table]
    # Nodes are separated by what may follow, one symbol further in each round, until a round separates no more.
    group = [0] * len(rows)
    while True:
        signs = [(group[n], *((symbol, group[to]) for symbol, to in row.items())) for n, row in enumerate(rows)]
        names = {sign: number for number, sign in enumerate(dict.fromkeys(signs))}
        finer = [names[sign] for sign in signs]
        if len(names) == len(set(group)):
            break
        group = finer
    some = dict(zip(group, rows, strict=True))
    order = {group[0]: 0}
    queue = [group[0]]
    for current in queue:
        for to in some[current].values():
            if group[to] not in order:
                order[group[to]] = len(order)
                queue.append(group[to])
    return tuple(tuple((symbol, order[group[to]]) for symbol, to in some[member].items()) for member in queue)


def side(table: Sequence[Sequence[int]], parts: int) -> int:
    """A number below ``parts`` that depends only on the allowed sequences: equal automata get the same number."""
    digest = blake2b(repr(canonical(table)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % parts


def random_walks(generator: torch.Generator, table: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Walks from node 0 through ``table (N, nodes, symbols)``, each allowed symbol being equally likely.

    Returns the symbols ``(N, steps)`` and the nodes ``(N, steps)`` at which they were drawn.
    """
    every = torch.arange(len(table))
    node = torch.zeros(len(table), dtype=torch.int64)
    symbols, nodes = [], []
    for _ in range(steps):
        here = table[every, node]
        symbol = distinct(generator, len(table), (here >= 0).double(), 1)
        symbols.append(symbol[:, 0])
        nodes.append(node)
        node = here.gather(1, symbol)[:, 0]
    return torch.stack(symbols, 1), torch.stack(nodes, 1)
