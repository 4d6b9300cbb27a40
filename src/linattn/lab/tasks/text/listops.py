"""ListOps of the Long Range Arena (arXiv:2011.04006, 1804.06028): compute the value of a nested list."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import Sequences
from linattn.lab.tasks.text.checks import at_least, between, ordered, require
from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.lab.tasks.text.listops_trees import random_trees
from linattn.support.options import SettingError

PAD = 0
DIGIT = 1  # 1 .. 10 are the digits 0 .. 9
OPERATOR = 11  # 11 .. 14 open a list
CLOSE = 15
OPERATORS = ("MIN", "MAX", "MED", "SM")
TOKENS = ("pad", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")


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
    length: int = 2000
    shortest: int = 500
    depth: int = 10
    arguments: tuple[int, int] = (2, 10)
    branching: float = 0.25
    test_examples: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("depth", self.depth, 2)
        between("branching", self.branching, 0.01, 1)
        ordered("arguments", self.arguments, 1)
        at_least("shortest", self.shortest, 0)
        require("length", self.length > self.shortest + 4, f"above shortest + 4 = {self.shortest + 4}", self.length)

    @property
    def vocabulary(self) -> int:
        return len(TOKENS)

    @property
    def classes(self) -> int:
        return 10

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        inputs: list[Tensor] = []
        answers: list[Tensor] = []
        found, attempts = 0, 0
        while found < count:
            drawn, answer = random_trees(
                generator, 1024, self.depth, self.arguments, self.branching, self.shortest, self.length
            )
            inputs.append(drawn)
            answers.append(answer)
            found, attempts = found + len(answer), attempts + 1
            if attempts >= 200 and not found:
                raise SettingError(
                    "shortest",
                    f"no expression of {self.shortest} to {self.length} tokens in {1024 * attempts} with depth "
                    f"{self.depth}, arguments {self.arguments} and branching {self.branching}: change these settings",
                )
        tokens = torch.cat(inputs)[:count]
        return Sequences(tokens, torch.cat(answers)[:count], tokens != PAD)
