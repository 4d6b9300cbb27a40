"""Which norm stands behind a mechanism where nobody says."""

from collections.abc import Iterable, Mapping
from typing import Any

# They divide by what they sum, or end in a norm; without one behind it the output of the others grows with what they
# remember. A second norm behind that of zeros would bring a head that starts near 0, as its paper has it, to 1.
NORMED_THEMSELVES = {"softmax", "window", "zeros_softmax", "zeros"}


def norm_behind(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """``head_rms``, or None where all layers, each a mechanism and its options, need none.

    Example:
        >>> norm_behind([("softmax", {}), ("zeros", {})]), norm_behind([("zeros", {"head_norm": False})])
        (None, 'head_rms')
    """
    alone = all(name in NORMED_THEMSELVES and options.get("head_norm", True) for name, options in layers)
    return None if alone else "head_rms"
