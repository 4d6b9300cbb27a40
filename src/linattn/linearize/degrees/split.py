"""What decides how many features each layer of ``dof`` gets."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from linattn.linearize.degrees.allocate import split_cost
from linattn.linearize.degrees.start import TOLERANCE
from linattn.support.options import OptionError
from linattn.train.checks import check_integer, check_number


@dataclass(frozen=True)
class Split:
    """A budget of features that layers share by their degrees of freedom.

    Attributes:
        cost: mean number of features of a layer; None: the head's dimension.
        clip: at most so many, and what this takes from a layer is saved: "DoF+Clip" of the paper, where it is the
            head's dimension. None: as many as its degrees of freedom give it.
        tolerance: of the degrees of freedom, in units of the largest eigenvalue; smaller counts more.

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
        """Features of each layer."""
        return split_cost(degrees, self.cost or head_dim, clip=self.clip)

    def without_degrees(self, head_dim: int) -> int:
        """Features of every layer, where nothing is known of their degrees of freedom."""
        return min(self.cost or head_dim, self.clip or self.cost or head_dim)


def taken(method: str, options: Mapping[str, Any]) -> tuple[Split | None, dict[str, Any]]:
    """The split that a method's options ask for, checked, and the other options; None: the method has none."""
    if method != "dof":
        return None, dict(options)
    names = {each.name for each in fields(Split)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    split = Split(**given)
    split.check()
    for name in ("cost", "clip"):
        if name in given and "feature_dim" in options:
            raise OptionError(name, "is of what layers share, and feature_dim gives each its own: give one of them")
    return split, {name: value for name, value in options.items() if name not in names}
