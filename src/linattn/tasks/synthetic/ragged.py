"""Arrays of many groups of different sizes, laid end to end: what loops over groups would do, without the loops."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Groups(NamedTuple):
    """``sizes (M,)``; of each of the ``sum(sizes)`` members its group ``of`` and its place ``inner`` in the group."""

    sizes: Ints
    base: Ints
    of: Ints
    inner: Ints


def groups(sizes: Ints) -> Groups:
    """
    Example:
        >>> found = groups(np.array([2, 3]))
        >>> found.base.tolist(), found.of.tolist(), found.inner.tolist()
        ([0, 2], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    """
    base = np.cumsum(sizes) - sizes
    of = np.repeat(np.arange(len(sizes)), sizes)
    return Groups(sizes, base, of, np.arange(len(of)) - base[of])


def shuffled(rng: np.random.Generator, of: Ints) -> Ints:
    """Indices of all members, group after group as ``of`` has them, in random order inside each.

    Example:
        >>> of = np.array([0, 0, 0, 1, 1])
        >>> of[shuffled(np.random.default_rng(0), of)].tolist()
        [0, 0, 0, 1, 1]
    """
    return np.argsort(of + rng.random(len(of)))


def below(rng: np.random.Generator, limits: Ints) -> Ints:
    """One whole number from ``0 .. limit - 1`` for each limit, all alike."""
    return (rng.random(len(limits)) * limits).astype(np.int64)


def written(lexicon: Ints, lengths: Ints, slots: Ints) -> tuple[Ints, Ints]:
    """Tokens of entries ``slots (S,)`` of a lexicon ``(W, longest)``, end to end, and the length of each slot.

    Entry w has the tokens ``lexicon[w, : lengths[w]]``.
    """
    sizes = lengths[slots]
    begin = np.cumsum(sizes) - sizes
    place = np.repeat(slots * lexicon.shape[1] - begin, sizes)
    place += np.arange(len(place))
    return lexicon.ravel()[place], sizes
