"""The options that decide how many features each layer of the method ``dof`` gets."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from linattn.convert.degrees.allocate import split_cost
from linattn.convert.degrees.start import TOLERANCE
from linattn.support.checks import check_integer, check_number
from linattn.support.options import OptionError


@dataclass(frozen=True)
class Split:
    """A budget of features that layers share by their degrees of freedom.

    Attributes:
        cost: mean number of features per layer; None: the head's dimension.
        clip: most features that a layer may have; what it takes from one layer is saved, not given to others. This is
            "DoF+Clip" of the paper, which clips to the head's dimension. None: no such limit.
        tolerance: lambda of the degrees of freedom, in units of the largest eigenvalue; a smaller one gives more
            degrees.

    Example:
        >>> Split(cost=64, clip=64).dims({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, head_dim=64)
        {0: 64, 1: 48, 2: 32, 3: 16}
    """

    cost: int | None = None
    clip: int | None = None
    tolerance: float = TOLERANCE

    def check(self) -> None:
        """Raise OptionError that names the option and what is allowed."""
        for name, value in (("cost", self.cost), ("clip", self.clip)):
            if value is not None:
                check_integer(name, value, 1)
        check_number("tolerance", self.tolerance, above=0)

    def dims(self, degrees: Mapping[int, float], head_dim: int) -> dict[int, int]:
        """Number of features of each layer."""
        return split_cost(degrees, self.cost or head_dim, clip=self.clip)

    def without_degrees(self, head_dim: int) -> int:
        """Number of features of every layer while their degrees of freedom are not known."""
        count = self.cost or head_dim
        return count if self.clip is None else min(count, self.clip)


def taken(method: str, options: Mapping[str, Any]) -> tuple[Split | None, dict[str, Any]]:
    """Divide a method's options into the :class:`Split` they ask for, checked, and all others.

    The split is None if the method is not ``dof``.
    """
    if method != "dof":
        return None, dict(options)
    names = {each.name for each in fields(Split)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    split = Split(**given)
    split.check()
    for name in ("cost", "clip"):
        if name in given and "feature_dim" in options:
            raise OptionError(name, "is for features that layers share, and feature_dim says how many each of them "
                              "has: give one of the two")  # fmt: skip
    return split, {name: value for name, value in options.items() if name not in names}
