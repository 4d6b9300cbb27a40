"""Random automata: who may follow whom, many at once; and which of them are the same."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from linattn.tasks.text.draws import choose, distinct, whole

Range = tuple[int, int]


def random_automata(
    generator: torch.Generator, count: int, symbols: int, nodes: Range, alphabet: Range, edges: Range
) -> Tensor:
    """``(count, max nodes, symbols)``: the node that a symbol leads to, -1 where it may not come.

    Sizes are uniform in the ranges, ends included. Each automaton has an alphabet of its own among the ``symbols``.
    Each node has edges with distinct symbols to distinct nodes, never to itself. All start at node 0.
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
    """The smallest automaton with the same sequences, its nodes in the order in which symbols first reach them.

    Two tables give the same result if and only if they allow the same sequences, whatever their nodes are called.
    """
    rows = [{symbol: to for symbol, to in enumerate(row) if to >= 0} for row in table]
    # Nodes are told apart by what may follow, one symbol further in each round, until a round tells no more apart.
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
    """A number below ``parts`` that depends on the allowed sequences alone: equal automata are on one side."""
    digest = blake2b(repr(canonical(table)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % parts


def random_walks(generator: torch.Generator, table: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """From node 0, each allowed symbol alike: symbols ``(N, steps)``, and nodes ``(N, steps)`` they were drawn at.

    ``table (N, nodes, symbols)``.
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
