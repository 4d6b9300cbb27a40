"""Splits a budget of feature dimensions between layers by their degrees of freedom."""

import math
from collections.abc import Mapping


def allocate(
    values: Mapping[int, float], cost: int, *, multiple: int = 16, smallest: int = 16, largest: int | None = None,
    clip: int | None = None,
) -> dict[int, int]:  # fmt: skip
    """Choose a dimension for each layer, in proportion to ``values``, with ``cost`` as the mean of all dimensions.

    Dimensions are multiples of ``multiple`` from ``smallest`` to ``largest``. Where a layer is held at one of these
    limits, the others share the difference (water filling): the factor t solves
    ``sum_s clip(t N_s, smallest, largest) = cost * layers``, then all dimensions are rounded down and the rest is given
    out in multiples, the largest remainder first. Where ``cost * layers`` is not a multiple itself, what remains stays
    unused: the budget is never exceeded.

    ``clip`` is the paper's "DoF+Clip" and is applied last, ``M_s = min(M_s, clip)``: what it takes from a layer is
    saved, not given to the others.

    Example:
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64)
        {0: 160, 1: 48, 2: 32, 3: 16}
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64, largest=96)
        {0: 96, 1: 64, 2: 64, 3: 32}
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64, clip=64)
        {0: 64, 1: 48, 2: 32, 3: 16}
    """
    if clip is not None and (not isinstance(clip, int) or clip < 1):
        raise ValueError(f"clip must be an integer >= 1, or None, got {clip!r}")
    low, high, units = _limits(values, cost, multiple, smallest, largest)
    shares = dict(zip(values, _fill(list(values.values()), low, high, units), strict=True))
    found = {layer: math.floor(share) for layer, share in shares.items()}
    # The largest remainder first; among equal ones the larger value, then the earlier layer.
    order = sorted(shares, key=lambda layer: (found[layer] - shares[layer], -values[layer]))
    for layer in [layer for layer in order if found[layer] < high][: units - sum(found.values())]:
        found[layer] += 1
    most = math.inf if clip is None else clip
    return {layer: int(min(multiple * share, most)) for layer, share in found.items()}


def split_cost(values: Mapping[int, float], cost: int, *, clip: int | None = None) -> dict[int, int]:
    """:func:`allocate` for any mean ``cost``; a cost below 16 is itself the multiple and the smallest dimension.

    Example:
        >>> split_cost({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64)
        {0: 160, 1: 48, 2: 32, 3: 16}
        >>> split_cost({0: 40.0, 1: 10.0}, 8)
        {0: 8, 1: 8}
    """
    step = min(16, cost)
    return allocate(values, cost, multiple=step, smallest=step, clip=clip)


def _limits(
    values: Mapping[int, float], cost: int, multiple: int, smallest: int, largest: int | None
) -> tuple[int, int, int]:
    """Smallest and largest dimension of a layer, and the budget of all layers, in units of ``multiple``."""
    for name, number in (("cost", cost), ("multiple", multiple), ("smallest", smallest), ("largest", largest)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {number!r}")
    if not values:
        raise ValueError("values must name at least one layer")
    for layer, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"values must be finite and > 0, got {value!r} for layer {layer}")
    units = cost * len(values) // multiple
    low = -(-smallest // multiple)
    high = units if largest is None else largest // multiple
    if not low <= high or not low * len(values) <= units <= high * len(values):
        allowed = f"from smallest={low * multiple} to largest={high * multiple if largest is not None else 'any'}"
        raise ValueError(f"cost must lie {allowed} (multiples of {multiple}), got {cost}")
    return low, high, units


def _fill(values: list[float], low: int, high: int, units: int) -> list[float]:
    """Shares ``clip(t v, low, high)`` whose sum is ``units``, by bisection on ``log t``: the sum grows with t."""

    def shares(log_t: float) -> list[float]:
        # In logarithms: t v itself may overflow where values differ by many orders of magnitude.
        logs = (min(max(log_t + math.log(value), math.log(low)), math.log(high)) for value in values)
        return [min(max(math.exp(x), low), high) for x in logs]

    below, above = math.log(low) - math.log(max(values)), math.log(high) - math.log(min(values))
    for _ in range(200):
        middle = (below + above) / 2
        if sum(shares(middle)) < units:
            below = middle
        else:
            above = middle
    return shares(below)  # the lower end: after rounding down, the sum cannot exceed the budget
