"""Patterns: short texts that say which mechanism each layer has."""

from itertools import cycle, islice

from linattn.support.options import OptionError


def layer_names(pattern: str, depth: int, option: str = "hybrid") -> list[str]:
    """One name for each of ``depth`` layers: the names of the pattern, repeated.

    Names are separated by commas or slashes; ``name*3`` stands for three layers.

    Example:
        >>> layer_names("gated*3,softmax", 6)
        ['gated', 'gated', 'gated', 'softmax', 'gated', 'gated']
    """
    names: list[str] = []
    for part in pattern.replace("/", ",").split(","):
        name, star, times = (text.strip() for text in part.partition("*"))
        if not name or (star and not (times.isdecimal() and int(times))):
            raise OptionError(option, f"must look like gated*3,softmax, got {pattern!r}")
        names += [name] * (int(times) if star else 1)
    if len(names) > depth:
        raise OptionError(option, f"names {len(names)} layers, but the model has {depth}, got {pattern!r}")
    return list(islice(cycle(names), depth))
