"""Which norm follows a mechanism by default."""

from collections.abc import Iterable, Mapping
from typing import Any

# These divide by the sum of their weights, or end in a norm. The output of all others grows with what they remember and
# needs a norm. A second norm after that of ZeroS would scale its heads to 1, which start near 0 in its paper.
NORMED_THEMSELVES = {"softmax", "window", "zeros_softmax", "zeros"}


def norm_behind(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """``head_rms``, or None if no layer needs a norm; each of ``layers`` is a mechanism's name and its options.

    Example:
        >>> norm_behind([("softmax", {}), ("zeros", {})]), norm_behind([("zeros", {"head_norm": False})])
        (None, 'head_rms')
    """
    alone = all(name in NORMED_THEMSELVES and options.get("head_norm", True) for name, options in layers)
    return None if alone else "head_rms"
