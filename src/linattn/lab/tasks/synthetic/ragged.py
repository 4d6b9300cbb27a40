"""Groups of different sizes laid end to end in arrays, and operations on all groups at once, without loops."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Groups(NamedTuple):
    """``sizes (M,)``, and for each of ``sum(sizes)`` members its group ``of`` and its place ``inner`` in the group."""

    sizes: Ints
    base: Ints
    of: Ints
    inner: Ints


def groups(sizes: Ints) -> Groups:
    """Groups of these sizes.

    Example:
        >>> found = groups(np.array([2, 3]))
        >>> found.base.tolist(), found.of.tolist(), found.inner.tolist()
        ([0, 2], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    """
    base = np.cumsum(sizes) - sizes
    of = np.repeat(np.arange(len(sizes)), sizes)
    return Groups(sizes, base, of, np.arange(len(of)) - base[of])


def shuffled(rng: np.random.Generator, of: Ints) -> Ints:
    """Indices of all members, group after group in the order of ``of``, shuffled inside each group.

    Example:
        >>> of = np.array([0, 0, 0, 1, 1])
        >>> of[shuffled(np.random.default_rng(0), of)].tolist()
        [0, 0, 0, 1, 1]
    """
    return np.argsort(of + rng.random(len(of)))


def below(rng: np.random.Generator, limits: Ints) -> Ints:
    """For each limit, a uniform whole number from ``0 .. limit - 1``."""
    return (rng.random(len(limits)) * limits).astype(np.int64)


def written(lexicon: Ints, lengths: Ints, slots: Ints) -> tuple[Ints, Ints]:
    """Tokens of the entries ``slots (S,)`` of a lexicon ``(W, longest)``, end to end, and the length of each entry.

    Entry w has the tokens ``lexicon[w, : lengths[w]]``.
    """
    sizes = lengths[slots]
    begin = np.cumsum(sizes) - sizes
    place = np.repeat(slots * lexicon.shape[1] - begin, sizes)
    place += np.arange(len(place))
    return lexicon.ravel()[place], sizes
