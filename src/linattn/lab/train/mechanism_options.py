"""Parses options of mechanisms from the texts of ``--option``, for images and for sequences."""

from ast import literal_eval
from collections.abc import Container, Iterable, Mapping
from typing import Any

from linattn.support.options import OptionError


def parse_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse ``key=value`` and ``mechanism.key=value`` into options by mechanism; the empty name has those for all.

    Values become Python's numbers, True, False or None where possible, and stay text otherwise.

    Example:
        >>> parse_options(["gate=head", "lion.decay=fixed", "mlstm.soft_cap=15.0"])
        {'': {'gate': 'head'}, 'lion': {'decay': 'fixed'}, 'mlstm': {'soft_cap': 15.0}}
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name, dot, own = key.strip().rpartition(".")
        if not equals or not own or (dot and not name):
            raise OptionError("option", f"must look like key=value or mechanism.key=value, got {text!r}")
        found.setdefault(name, {})[own] = _value(value.strip())
    return found


def layer_options(names: list[str], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of each layer, for its mechanism in ``names``; an option that no layer takes is refused."""
    for name in options:
        if name and name not in names:
            raise OptionError("option", f"{name}.* is given, but the layers are {', '.join(dict.fromkeys(names))}")
    if options.get("") and len(set(names)) > 1:
        raise OptionError("option", "with several mechanisms, say whose it is: mechanism.key=value")
    return [dict(options.get("", {})) | dict(options.get(name, {})) for name in names]


def own_options(name: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options of mechanism ``name``, among those of all mechanisms that are compared.

    Example:
        >>> own_options("pola", parse_options(["pola.alpha=4", "mirror.modulation=none"]))
        {'alpha': 4}
    """
    return layer_options([name], {key: value for key, value in options.items() if key in ("", name)})[0]


def check_compared(options: Mapping[str, Mapping[str, Any]], names: Container[str]) -> None:
    """Raise for options of a mechanism that is not one of ``names``."""
    for name in options:
        if name and name not in names:
            raise OptionError("option", f"{name}.* is given, but {name} is not compared")


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``name`` among those given as ``key=value``, for all, and ``name.key=value``, for one.

    Example:
        >>> options_of("pola", {"pola.alpha": 4, "mirror.modulation": "none", "gate": "head"})
        {'alpha': 4, 'gate': 'head'}
    """
    parts = [(*key.rpartition("."), value) for key, value in options.items()]
    return {key: value for owner, _, key, value in parts if owner in ("", name)}


def check_owners(options: Mapping[str, Any], names: Container[str]) -> None:
    """Raise for an option of a mechanism that is not one of ``names``."""
    for key in options:
        owner = key.rpartition(".")[0]
        if owner and owner not in names:
            raise OptionError("option", f"{key} is given, but {owner} is not compared")


def option_or(other: str, error: Exception, name: str, own: Mapping[str, Any], model: str = "host") -> OptionError:
    """Turn an ``error`` in creating a ``model`` with mechanism ``name`` into one of a command line option.

    The option is ``--option`` where the error is about one of the mechanism's ``own`` options, else ``other``.
    """
    message = str(error)
    if message.replace("=", " ").split(" ", 1)[0] in own:
        return OptionError("option", f"{name}: {message}")
    if "has no option" in message or "must not hold" in message:
        return OptionError("option", message)
    return OptionError(other, f"{name} does not fit this {model}: {message}")


def _value(text: str) -> Any:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text
