"""Which mechanism each layer has, and with which options, from short texts."""

from ast import literal_eval
from collections.abc import Iterable, Mapping
from itertools import cycle, islice
from typing import Any

from linattn.support.options import OptionError


def layer_names(pattern: str, depth: int, option: str = "hybrid") -> list[str]:
    """One name for each of ``depth`` layers: the pattern's, over and over.

    Names stand with commas between them, or slashes; ``name*3`` is three of a kind.

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


def parse_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """``key=value`` and ``mechanism.key=value`` as options by mechanism; those of all stand under the empty name.

    Values are Python's where they are numbers, True, False or None, and text where they are not.

    Example:
        >>> parse_options(["gate=head", "lion.decay=fixed", "mlstm.soft_cap=15.0"])
        {'': {'gate': 'head'}, 'lion': {'decay': 'fixed'}, 'mlstm': {'soft_cap': 15.0}}
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name, _, own = key.strip().rpartition(".")
        if not equals or not own:
            raise OptionError("option", f"must look like key=value or mechanism.key=value, got {text!r}")
        found.setdefault(name, {})[own] = _value(value.strip())
    return found


def layer_options(names: list[str], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of each layer; what no layer takes is refused."""
    for name in options:
        if name and name not in names:
            raise OptionError("option", f"{name}.* is given, but the layers are {', '.join(dict.fromkeys(names))}")
    if options.get("") and len(set(names)) > 1:
        raise OptionError("option", "with several mechanisms, say whose it is: mechanism.key=value")
    return [dict(options.get("", {})) | dict(options.get(name, {})) for name in names]


def _value(text: str) -> Any:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text
