"""Splits a budget of feature dimensions between layers by their degrees of freedom."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from linattn.support.config import Config, option
from linattn.support.options import OptionError


def allocate(
    values: Mapping[int, float], cost: int, *, multiple: int = 16, smallest: int = 16, clip: int | None = None
) -> dict[int, int]:
    """Choose a dimension for each layer, in proportion to ``values``, with ``cost`` as the mean of all dimensions.

    Dimensions are multiples of ``multiple``, at least ``smallest``; what layers at this limit take, the others give
    (water filling): the factor t solves ``sum_s max(t N_s, smallest) = cost * layers``, then all dimensions are rounded
    down and the rest is given out in multiples, the largest remainder first. Where ``cost * layers`` is not a multiple
    itself, what remains stays unused: the budget is never exceeded.

    ``clip`` is the paper's "DoF+Clip" and is applied last, ``M_s = min(M_s, clip)``: what it takes from a layer is
    saved, not given to the others.

    Example:
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64)
        {0: 160, 1: 48, 2: 32, 3: 16}
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64, clip=64)
        {0: 64, 1: 48, 2: 32, 3: 16}
    """
    for name, number in (("cost", cost), ("multiple", multiple), ("smallest", smallest), ("clip", clip)):
        if not (name == "clip" and number is None) and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be an integer >= 1{', or None' * (name == 'clip')}, got {number!r}")
    if not values:
        raise ValueError("values must name at least one layer")
    for layer, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"values must be finite and > 0, got {value!r} for layer {layer}")
    units, low = cost * len(values) // multiple, -(-smallest // multiple)  # all layers' budget, and the least of each
    if low * len(values) > units:
        raise ValueError(f"cost must be at least smallest={low * multiple} (multiples of {multiple}), got {cost}")
    shares = dict(zip(values, _fill(list(values.values()), low, units), strict=True))
    dims = {layer: math.floor(share) for layer, share in shares.items()}
    # The largest remainder first; among equal ones the larger value, then the earlier layer.
    order = sorted(shares, key=lambda layer: (dims[layer] - shares[layer], -values[layer]))
    for layer in [layer for layer in order if dims[layer] < units][: units - sum(dims.values())]:
        dims[layer] += 1
    return {layer: int(min(multiple * share, clip or math.inf)) for layer, share in dims.items()}


def _fill(values: list[float], low: int, units: int) -> list[float]:
    """Shares ``clip(t v, low, units)`` whose sum is ``units``, by bisection on ``log t``: the sum grows with t."""

    def shares(log_t: float) -> list[float]:
        # In logarithms: t v itself may overflow where values differ by many orders of magnitude.
        logs = (min(max(log_t + math.log(value), math.log(low)), math.log(units)) for value in values)
        return [min(max(math.exp(x), low), units) for x in logs]

    below, above = math.log(low) - math.log(max(values)), math.log(units) - math.log(min(values))
    for _ in range(200):
        middle = (below + above) / 2
        if sum(shares(middle)) < units:
            below = middle
        else:
            above = middle
    return shares(below)  # the lower end: after rounding down, the sum cannot exceed the budget


def split_cost(values: Mapping[int, float], cost: int, *, clip: int | None = None) -> dict[int, int]:
    """:func:`allocate` for any mean ``cost``; a cost below 16 is itself the multiple and the smallest dimension.

    Example:
        >>> split_cost({0: 40.0, 1: 10.0}, 8)
        {0: 8, 1: 8}
    """
    step = min(16, cost)
    return allocate(values, cost, multiple=step, smallest=step, clip=clip)


@dataclass(frozen=True, kw_only=True)
class Split(Config):
    """A budget of features that layers of the method ``dof`` share by their degrees of freedom.

    Example:
        >>> Split(cost=64, clip=64).dims({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, head_dim=64)
        {0: 64, 1: 48, 2: 32, 3: 16}
    """

    cost: int | None = option(None, "Mean number of features of a layer; None: the head's dimension.", least=1)
    clip: int | None = option(
        None, "Most features of a layer; what it takes from one is saved, not given to others: DoF+Clip of the paper, "
        "which clips to the head's dimension. None: no limit.", least=1,
    )  # fmt: skip
    tolerance: float = option(
        2**-4, "Of the degrees of freedom, in units of the largest eigenvalue; a smaller one gives more degrees.",
        above=0,
    )  # fmt: skip

    def dims(self, degrees: Mapping[int, float], head_dim: int) -> dict[int, int]:
        """Number of features of each layer."""
        return split_cost(degrees, self.cost or head_dim, clip=self.clip)

    def without_degrees(self, head_dim: int) -> int:
        """Number of features of every layer while their degrees of freedom are not known."""
        return min(self.cost or head_dim, self.clip or self.cost or head_dim)


def taken(method: str, options: Mapping[str, Any]) -> tuple[Split | None, dict[str, Any]]:
    """Divide a method's options into the :class:`Split` they ask for and all others; None unless it is ``dof``."""
    if method != "dof":
        return None, dict(options)
    names = {each.name for each in fields(Split)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    split = Split(**given)
    for name in ("cost", "clip"):
        if name in given and "feature_dim" in options:
            raise OptionError(name, "is for features that layers share, and feature_dim says how many each of them "
                              "has: give one of the two")  # fmt: skip
    return split, {name: value for name, value in options.items() if name not in names}
