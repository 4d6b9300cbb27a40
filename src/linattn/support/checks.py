"""Checks of the numbers of a config; errors name the field and its limits."""

import math
from typing import Any

from linattn.support.options import OptionError


def check_integer(option: str, value: object, least: int) -> None:
    """Raise ``OptionError`` that names the field and what is allowed."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(option, f"must be an integer of at least {least}, got {value!r}")


def check_graphs(value: object, device: str) -> None:
    """Check ``graphs`` of a config: to demand CUDA graphs without CUDA is an error, to leave the choice open is not."""
    if value is not None and not isinstance(value, bool):
        raise OptionError("graphs", f"must be True, False or None, got {value!r}")
    if value and not device.startswith("cuda"):
        raise OptionError("graphs", f"CUDA graphs need a GPU, and device is {device}: leave it out, or name cuda")


def check_number(
    option: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ``OptionError`` that names the field and the limits it must keep to."""
    limits = {"at least": least, "at most": most, "above": above, "below": below}
    rule = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, and each field has a limit, so NaN needs no check of its own.
    if not (
        number
        and abs(value) < math.inf
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (above is None or value > above)
        and (below is None or value < below)
    ):
        raise OptionError(option, f"must be a number {rule}, got {value!r}")
