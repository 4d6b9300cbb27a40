"""The command ``linattn``: every command is a config, whose fields are its options and whose ``run`` is its work.

A command line is turned into texts by name, and :meth:`Config.parse` does the rest, as it does for ``--config FILE``.
So a config needs no command line: ``python -m linattn.lab NAME key=value ...`` runs one where only torch is installed.
"""

import importlib
import inspect
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol, get_origin, get_type_hints

from linattn._version import __version__
from linattn.lab.commands import COMMANDS
from linattn.lab.screen import Screen
from linattn.support.config import Config, Option, alternatives, option_of
from linattn.support.extras import MissingExtraError
from linattn.support.options import OptionError

BAD_OPTION, INTERRUPTED = 2, 130
LAST = {"Machine": 98, "Output": 99}  # panels that all commands have stand below those of their own


class Command(Protocol):
    """A config that can be run; the exit code is what it returns."""

    def run(self, screen: Screen) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = command_name(words)
    if name == "compare" and any(word.partition("=")[0] == "--task" for word in words):
        name, words = "compare text", ["compare", "text", *words[1:]]
    try:
        return _run(name, words)
    except OptionError as error:
        said = f"Error: {_flag(name, error.option)}: {error.message}"
        print(said, f"Try 'linattn {name} --help'.".replace("  ", " "), sep="\n", file=sys.stderr)
        return BAD_OPTION
    except MissingExtraError as error:
        print(f"Error: {error}", file=sys.stderr)
        return BAD_OPTION
    except KeyboardInterrupt:
        print("Interrupted; what is finished is kept. The same command goes on.", file=sys.stderr)
        return INTERRUPTED


def command_name(words: Sequence[str]) -> str:
    """The longest name in the table of commands with which a command line starts."""
    leading = [" ".join(words[:count]) for count in (2, 1)]
    return next((name for name in leading if name in COMMANDS), "")


def load(name: str) -> type[Config]:
    """The config of a command; its module is imported now."""
    module, _, cls = COMMANDS[name].config.partition(":")
    found: type[Config] = getattr(importlib.import_module(module), cls)
    return found


def _run(name: str, words: list[str]) -> int:
    from cyclopts import CycloptsError

    everything = "--help-all" in words
    words = ["--help" if word == "--help-all" else word for word in words]
    app = create_app(name, everything)
    try:
        return int(app(words, exit_on_error=False, print_error=False) or 0)
    except CycloptsError as error:
        print(
            f"Error: {_in_our_words(error)}",
            f"Try 'linattn {name} --help'.".replace("  ", " "),
            sep="\n",
            file=sys.stderr,
        )
        return BAD_OPTION


def _in_our_words(error: Any) -> str:
    return " ".join(str(error).replace("Unknown option:", "there is no option").split())


def create_app(name: str = "", everything: bool = False) -> Any:
    """The whole command line; of the commands only ``name`` is imported, the others show their line of the table."""
    from cyclopts import App

    app = App(
        name="linattn", help="Linear attention for PyTorch.", version=__version__, version_flags=["--version"],
        help_format="plaintext", result_action="return_value", suppress_keyboard_interrupt=False,
    )  # fmt: skip
    app.register_install_completion_command(name="--install-completion")
    groups: dict[str, Any] = {}
    for title, command in COMMANDS.items():
        first, _, second = title.rpartition(" ")
        place = app
        if first:
            if first not in groups and first in COMMANDS:
                groups[first] = app[first]
            elif first not in groups:
                groups[first] = App(name=first, help=COMMANDS[title].group, help_format="plaintext")
                app.command(groups[first])
            place = groups[first]
        if title == name:
            place.command(_function(load(title), everything), name=second, help=_help(load(title), everything))
        else:
            place.command(_stub(title), name=second, help=command.summary)
    return app


def _stub(title: str) -> Any:
    def run() -> int:
        raise AssertionError(f"{title} is loaded when it is named")

    return run


def _help(config: type[Config], everything: bool) -> str:
    parts = inspect.cleandoc(config.__doc__ or "").partition("\n\nExample:")[0].split("\n\n")
    text = "\n\n".join(" ".join(part.split()) for part in parts)
    rare = any(option_of(own).rare for own in fields(config))
    return text + ("\n\n--help-all shows all options." if rare and not everything else "")


def _function(config: type[Config], everything: bool) -> Any:
    """A function with a parameter for each field, whose annotations tell cyclopts names, help and panels."""
    from cyclopts import Group, Parameter

    def run(*positional: Any, **given: Any) -> int:
        quiet, as_json, file = given.pop("quiet", False), given.pop("json", False), given.pop("config", None)
        chosen = {key: value for key, value in given.items() if value is not None}
        chosen |= {key: value for key, value in zip(arguments, positional, strict=False) if value is not None}
        chosen |= {key: ",".join(value) for key, value in chosen.items() if key in repeated}
        made: Any = config.parse(read_config(file) | chosen)
        return int(made.run(Screen(quiet=quiet, as_json=as_json)))

    hints = get_type_hints(config)
    whole = {own.name for own in fields(config) if option_of(own).repeated}  # their texts may have commas
    repeated = {name for name, hint in hints.items() if get_origin(alternatives(hint)[0][0]) is tuple} - whole
    parameters, arguments = [], []
    panels: dict[str, Any] = {}
    for own in fields(config):
        rule = option_of(own)
        if rule.hidden:
            continue
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if rule.argument else inspect.Parameter.KEYWORD_ONLY
        panel = rule.group or "Options"
        panels.setdefault(panel, Group(panel, sort_key=LAST.get(panel, len(panels))))
        default = _shown_default(own, rule)
        annotation: Any = Annotated[
            list[str] | None if rule.repeated else _typed(hints[own.name]),
            Parameter(
                name=None if rule.argument else flag(own.name),
                help=rule.help + _shown_choices(rule),
                group=panels[panel],
                show_default=_always(default) if default else False,
                negative=None if alternatives(hints[own.name])[0][0] is bool else (),
                show=everything or not rule.rare,
                required=own.default is MISSING and own.default_factory is MISSING,
            ),
        ]
        parameters.append(inspect.Parameter(own.name, kind, default=None, annotation=annotation))
        if rule.argument:
            arguments.append(own.name)
    common: dict[str, tuple[Any, Any, str]] = {
        "config": (Path | None, None, "A TOML file with options; those of the command line win."),
        "json": (bool, False, "Print the results as JSON, and nothing else."),
        "quiet": (bool, False, "Print nothing but errors."),
    }
    for key, (kind_of, default, text) in common.items():
        shown = Parameter(
            name=f"--{key}", help=text, group=Group("Output", sort_key=LAST["Output"]), negative=(), show_default=False
        )
        parameters.append(
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind_of, shown]
            )
        )
    positional_first = sorted(parameters, key=lambda one: one.kind)
    run.__signature__ = inspect.Signature(positional_first)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__name__ = config.__name__
    return run


def _always(text: str) -> Any:
    return lambda value: text


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag(command: str, name: str) -> str:
    """How an option is written: its place in capitals for an argument."""
    known = {own.name: option_of(own) for own in fields(load(command))} if command else {}
    return name.upper() if name in known and known[name].argument else flag(name)


def _typed(hint: Any) -> Any:
    """What the command line reads: texts, which the config parses, flags, and what may be given again."""
    kind = alternatives(hint)[0][0]
    if kind is bool:
        return bool | None
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, Mapping | tuple):
        return list[str] | None
    return kind | None if kind in (int, float, Path) else str | None


def _shown_default(own: Field[Any], rule: Option) -> str:
    value = own.default if own.default_factory is MISSING else own.default_factory()
    if rule.default_text or value is MISSING or value in (None, False, "", (), {}):
        return rule.default_text
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _shown_choices(rule: Option) -> str:
    return f" One of {', '.join(map(str, rule.allowed()))}." if rule.choices and not callable(rule.choices) else ""


def read_config(path: Path | None) -> dict[str, Any]:
    """The options in a TOML file; dashes in names count as underscores."""
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError("config", f"{path} is no TOML file that can be read: {error}") from error
    return {key.replace("-", "_"): value for key, value in found.items()}
