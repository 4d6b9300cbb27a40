"""Helpers for rows of needle results, by the haystack that hides the needle."""

from collections.abc import Iterable, Mapping
from typing import Any

from linattn.convert.evaluate.haystack import NOISE


def haystack_of(row: Mapping[str, Any]) -> str:
    """The haystack of a row; rows of older files do not name it and mean ``noise``.

    Example:
        >>> haystack_of({"length": 64, "found": 0.5})
        'noise'
    """
    return str(row.get("haystack") or NOISE)


def haystack_words(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Each haystack of the rows with the words it adds to a title: none if all rows are of noise.

    Example:
        >>> haystack_words([{"haystack": "noise"}, {"haystack": "text"}])
        {'noise': ' in noise', 'text': ' in text'}
    """
    names = list(dict.fromkeys(map(haystack_of, rows)))
    return {name: "" if names == [NOISE] else f" in {name}" for name in names}
