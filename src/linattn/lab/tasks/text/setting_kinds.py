"""Checks the types of a task's settings before the task looks at their values."""

from collections.abc import Mapping
from os import PathLike
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from linattn.support.options import SettingError

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", NoneType: "None"}


def check_kinds(task: type, settings: Mapping[str, Any]) -> None:
    """Raise SettingError for a setting whose type is not that of the dataclass ``task``; lists pass for tuples.

    Example:
        >>> from linattn.lab.tasks.text.mqar import Mqar
        >>> check_kinds(Mqar, {"vocab": 64, "train_examples": None})
        >>> check_kinds(Mqar, {"vocab": "many"})
        Traceback (most recent call last):
            ...
        linattn.support.options.SettingError: vocab: must be a whole number, got 'many'
    """
    kinds = get_type_hints(task)
    for setting, value in settings.items():
        if not _fits(value, kinds[setting]):
            raise SettingError(setting, f"must be {_in_words(kinds[setting])}, got {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple | list):
            return False
        inner = get_args(kind)
        if inner[-1] is ...:
            inner = inner[:1] * len(value)
        return len(inner) == len(value) and all(map(_fits, value, inner))
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, str | PathLike if kind is str else kind)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(map(_in_words, get_args(kind)))
    if get_origin(kind) is not tuple:
        return WORDS[kind]
    *inner, last = map(_in_words, (one for one in get_args(kind) if one is not ...))
    return f"a list of {last}" if ... in get_args(kind) else f"({', '.join([*inner, last])})"
