"""Rows of needles by what they are hidden in."""

from collections.abc import Iterable, Mapping
from typing import Any

from linattn.linearize.evaluate.haystack import NOISE


def haystack_of(row: Mapping[str, Any]) -> str:
    """Files from before there were two do not name it.

    Example:
        >>> haystack_of({"length": 64, "found": 0.5})
        'noise'
    """
    return str(row.get("haystack") or NOISE)


def haystack_words(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Each haystack of the rows with what its title adds: nothing where all are of noise.

    Example:
        >>> haystack_words([{"haystack": "noise"}, {"haystack": "text"}])
        {'noise': ' in noise', 'text': ' in text'}
    """
    names = list(dict.fromkeys(map(haystack_of, rows)))
    return {name: "" if names == [NOISE] else f" in {name}" for name in names}
