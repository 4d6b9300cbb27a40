"""ListOps of the Long Range Arena (arXiv:2011.04006, 1804.06028): compute the value of a nested list."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from linattn.lab.tasks.text.generated import GeneratedTask, Range, require, whole
from linattn.lab.tasks.text.task import Sequences
from linattn.support.config import option
from linattn.support.options import OptionError

TOKENS = ("pad", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")


@dataclass(frozen=True, kw_only=True)
class ListOps(GeneratedTask):
    """The value of an expression, one of ten digits: ``[MAX 4 3 [MIN 2 3 ] 1 0 ]`` is 4.

    A node is an operator with chance ``branching``, else a digit; a node at depth ``depth`` (the root has depth 1) is a
    digit. The operators are smallest, largest, median (rounded down) and sum modulo 10, all equally likely; the number
    of their arguments is in the range ``arguments``. An operator takes two tokens, a digit one. Only expressions with
    more than ``shortest`` and fewer than ``length`` tokens are kept.

    Example:
        >>> batch = ListOps(shortest=3, length=20).batch(0, 1)
        >>> batch.inputs.shape, len(TOKENS)
        (torch.Size([1, 20]), 16)
    """

    name = "listops"
    kind = "classification"
    vocabulary = len(TOKENS)
    classes = 10
    length: int = option(2000, "Expressions have fewer tokens.")
    shortest: int = option(500, "Expressions have more tokens.", least=0)
    depth: int = option(10, "Deepest level of a node.", least=2)
    arguments: Range = option((2, 10), "Range of the arguments of an operator.", least=1)
    branching: float = option(0.25, "Chance of an operator at a node.", least=0.01, most=1)
    test_examples: int = option(2000, "Test sequences.", least=1)

    def check(self) -> None:
        super().check()
        require("length", self.length > self.shortest + 4, f"above shortest + 4 = {self.shortest + 4}", self.length)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        drawn: list[tuple[Tensor, Tensor]] = []
        found = 0
        while found < count:
            drawn.append(random_trees(generator, 1024, self))
            found += len(drawn[-1][1])
            if len(drawn) >= 200 and not found:
                raise OptionError(
                    "shortest",
                    f"no expression of {self.shortest} to {self.length} tokens in {1024 * len(drawn)} with depth "
                    f"{self.depth}, arguments {self.arguments} and branching {self.branching}: change these settings",
                )
        tokens, answers = (torch.cat(column)[:count] for column in zip(*drawn, strict=True))
        return Sequences(tokens, answers, tokens != 0)


@dataclass
class Level:
    """All nodes of one depth. Children of one parent are side by side, in the order of their parents."""

    tree: Tensor  # (n,) the expression each node belongs to
    operator: Tensor  # (n,) 0 .. 3, or -1 for a digit
    arity: Tensor  # (n,) number of children
    value: Tensor  # (n,) digits now, results of operators later
    size: Tensor  # (n,) tokens of the node and all nodes below


def random_trees(generator: torch.Generator, count: int, task: ListOps) -> tuple[Tensor, Tensor]:
    """Draw ``count`` expressions, keep those with ``shortest < tokens < length``: ``(kept, length)``, ``(kept,)``."""
    levels = _grow(generator, count, task)
    for upper, lower in zip(levels[-2::-1], levels[:0:-1], strict=True):
        _fold(upper, lower)
    size = levels[0].size
    kept = (size > task.shortest) & (size < task.length)
    row = torch.where(kept, kept.cumsum(0) - 1, -1)
    tokens = torch.zeros(int(kept.sum()), task.length, dtype=torch.int64)
    start = torch.zeros(count, dtype=torch.int64)
    _write(tokens, row, levels[0], start)
    for upper, lower in pairwise(levels):
        start = _starts(upper, lower, start)
        _write(tokens, row, lower, start)
    return tokens, levels[0].value[kept]


def _grow(generator: torch.Generator, count: int, task: ListOps) -> list[Level]:
    tree = torch.arange(count)
    used = torch.zeros(count, dtype=torch.int64)  # tokens so far: expressions that are too long do not grow further
    levels: list[Level] = []
    for depth in range(1, task.depth + 1):
        n = len(tree)
        is_operator = (torch.rand(n, generator=generator) < task.branching) & (depth < task.depth)
        used.scatter_add_(0, tree, 1 + is_operator.long())
        is_operator &= used[tree] < task.length
        kind = torch.randint(4, (n,), generator=generator)
        arity = whole(generator, *task.arguments, n) * is_operator
        digit = torch.randint(10, (n,), generator=generator)
        levels.append(Level(tree, torch.where(is_operator, kind, -1), arity, digit, 1 + is_operator.long()))
        tree = tree.repeat_interleave(arity)
        if not len(tree):
            break
    levels[0].size += task.length * (used >= task.length)  # a tree that was cut cannot pass for a short one
    return levels


def _fold(upper: Level, lower: Level) -> None:
    """Compute values and sizes of the operators in ``upper`` from their arguments in ``lower``."""
    parents = (upper.operator >= 0).nonzero()[:, 0]
    arity = upper.arity[parents]
    owner = torch.arange(len(parents)).repeat_interleave(arity)
    first = arity.cumsum(0) - arity
    size, total = torch.zeros(2, len(parents), dtype=torch.int64)
    size.scatter_add_(0, owner, lower.size)
    total.scatter_add_(0, owner, lower.value)
    ranked = lower.value[(owner * 10 + lower.value).argsort(stable=True)]  # arguments of one parent from low to high
    middle = ranked[first + (arity - 1) // 2] + ranked[first + arity // 2]
    results = torch.stack([ranked[first], ranked[first + arity - 1], middle // 2, total % 10])
    upper.value[parents] = results.gather(0, upper.operator[parents][None])[0]
    upper.size[parents] += size


def _starts(upper: Level, lower: Level, start: Tensor) -> Tensor:
    """Where each node of ``lower`` begins: after the opening token of its parent and the siblings before it."""
    before = lower.size.cumsum(0) - lower.size
    arity = upper.arity[upper.arity > 0]
    eldest = (arity.cumsum(0) - arity).repeat_interleave(arity)
    return start[upper.arity > 0].repeat_interleave(arity) + 1 + before - before[eldest]


def _write(tokens: Tensor, row: Tensor, level: Level, start: Tensor) -> None:
    """Write the tokens of a level: digits are 1 .. 10, operators open with 11 .. 14 and close with 15."""
    here, is_operator = row[level.tree], level.operator >= 0
    kept, opens = here >= 0, (here >= 0) & is_operator
    tokens[here[kept], start[kept]] = torch.where(is_operator, 11 + level.operator, 1 + level.value)[kept]
    tokens[here[opens], (start + level.size - 1)[opens]] = 15
