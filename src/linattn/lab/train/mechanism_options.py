"""Options of mechanisms, given for all by ``key=value`` or for one by ``mechanism.key=value``."""

from collections.abc import Container, Mapping
from typing import Any

from linattn.support.options import OptionError


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
