"""Typed configs: a field is the option, its check, its help, its entry in a file, and its part of the hash.

Only the standard library is used, so that configs can be made where no command line is installed.
"""

import hashlib
import json
import math
import types
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from linattn.support.options import OptionError, check_option

Choices = Iterable[object] | Callable[[], Iterable[object]]


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is said of a field besides its type and default."""

    help: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Choices | None = None  # of each element of a tuple; a function is called when a value is checked
    group: str = ""  # the panel of the help in which the option stands
    rare: bool = False  # shown by --help-all alone
    hidden: bool = False  # a field of Python alone: the command line does not have it
    repeated: bool = False  # a tuple of texts that may have commas, each given by an option of its own
    argument: bool = False  # given by its place in the command, without its name
    affects: bool = True  # whether results depend on it: the others are not part of the hash
    default_text: str = ""  # the default in words, where the value does not say it

    def allowed(self) -> list[object]:
        found = self.choices() if callable(self.choices) else self.choices
        return list(found or ())


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field of a :class:`Config`; ``more`` are the fields of :class:`Option`. Without a default it must be given."""
    meta = {"option": Option(help=help, **more)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(metadata=meta) if default is MISSING else field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A base of configs whose fields are made by :func:`option`. Every value is checked when a config is made.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Speed(Config):
        ...     tokens: tuple[int, ...] = option((1024,), "Numbers of tokens.", least=1)
        >>> Speed.parse({"tokens": "16,32"})
        Speed(tokens=(16, 32))
        >>> Speed(tokens=(0,))
        Traceback (most recent call last):
        linattn.support.options.OptionError: tokens: must be at least 1, got 0
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for own in fields(self):
            check_value(own.name, getattr(self, own.name), hints[own.name], option_of(own))
        self.check()

    def check(self) -> None:
        """Raise :class:`OptionError` for fields that do not go together."""

    def values(self, *, affecting: bool = False) -> dict[str, Any]:
        """The fields as JSON has them; ``affecting``: only those that results depend on."""
        chosen = [own for own in fields(self) if not affecting or option_of(own).affects]
        return {own.name: as_json(getattr(self, own.name)) for own in chosen}

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """A config from texts as they are typed, or from values of a file; an unknown name is refused."""
        return cls(**cls.typed(texts))

    @classmethod
    def typed(cls, texts: Mapping[str, Any]) -> dict[str, Any]:
        """The values of such texts by name, not checked yet."""
        hints, known = get_type_hints(cls), {own.name: option_of(own) for own in fields(cls)}
        for name in texts:
            if name not in known:
                raise OptionError(name, f"is no option; there are {', '.join(sorted(known))}")
        whole = {name: (text,) for name, text in texts.items() if known[name].repeated and isinstance(text, str)}
        return {name: parse_value(name, value, hints[name]) for name, value in {**texts, **whole}.items()}


def option_of(own: Field[Any]) -> Option:
    return own.metadata.get("option", Option())


def digest(value: Mapping[str, Any]) -> str:
    """A short hash of values of JSON, whatever their order."""
    text = json.dumps(as_json(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_json(value: Any) -> Any:
    """Paths become text, tuples lists, configs and dataclasses dicts."""
    if isinstance(value, Config):
        return value.values()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def parse_value(name: str, value: Any, hint: Any) -> Any:
    """A value of type ``hint``: text is read as it is typed, values of files become tuples and paths."""
    kinds, optional = alternatives(hint)
    if value is None or (optional and value in ("", "none")):
        return None
    kind = kinds[0]
    origin = get_origin(kind) or kind
    if origin is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return parts
        return tuple(parse_value(name, part, get_args(kind)[0]) for part in parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict(value) if isinstance(value, Mapping) else parse_settings(name, value)
    if kind is Path:
        return Path(value)
    if not isinstance(value, str) or str in kinds or origin is Literal:
        return float(value) if kind is float and type(value) is int else value
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    try:
        return words[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError) as error:
        raise OptionError(name, f"must be {_words(kind)}, got {value!r}") from error


def parse_settings(name: str, texts: str | Iterable[str]) -> dict[str, Any]:
    """Parse texts ``key=value``, with Python's numbers, True, False, None and lists of these where they read so.

    Example:
        >>> parse_settings("set", ["vocab=64", "kind=short", "lion.decay=0.5"])
        {'vocab': 64, 'kind': 'short', 'lion.decay': 0.5}
    """
    found: dict[str, Any] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise OptionError(name, f"must look like key=value, got {text!r}")
        try:
            found[key] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def alternatives(hint: Any) -> tuple[list[Any], bool]:
    """The types of a hint without None, and whether None is among them."""
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def check_value(name: str, value: Any, hint: Any, rule: Option) -> None:
    """Raise :class:`OptionError` unless a value has the type of ``hint`` and keeps to the limits of ``rule``."""
    kinds, optional = alternatives(hint)
    if value is None and optional:
        return
    origin = get_origin(kinds[0]) or kinds[0]
    if origin is tuple:
        parts = get_args(kinds[0])
        if not isinstance(value, tuple) or (Ellipsis not in parts and len(value) != len(parts)):
            count = "" if Ellipsis in parts else f" of {len(parts)}"
            raise OptionError(name, f"must be a tuple{count}, got {value!r}")
        for part in value:
            check_value(name, part, parts[0], rule)
        return
    if not any(_fits(value, kind) for kind in kinds):
        raise OptionError(name, f"must be {' or '.join(map(_words, kinds))}, got {value!r}")
    if allowed := rule.allowed():
        check_option(name, value, allowed)
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_limits(name, value, rule)


def _check_limits(name: str, value: float, rule: Option) -> None:
    rules = (
        ("at least", ge, rule.least),
        ("at most", le, rule.most),
        ("above", gt, rule.above),
        ("below", lt, rule.below),
    )
    limits = [(words, holds, limit) for words, holds, limit in rules if limit is not None]
    # A limit that is not there allows every number but infinities and NaN.
    if not math.isfinite(value) or not all(holds(value, limit) for _, holds, limit in limits):
        said = " and ".join(f"{words} {limit:g}" for words, _, limit in limits) or "finite"
        raise OptionError(name, f"must be {said}, got {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or not isinstance(origin, type) or isinstance(value, origin)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
