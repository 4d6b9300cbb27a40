"""The command ``linattn``: every command is a config, whose fields are its options and whose ``run`` is its work.

A command line is turned into texts by name, and :meth:`Config.parse` does the rest, as it does for ``--config FILE``.
So a config needs no command line: ``python -m linattn.lab NAME key=value ...`` runs one where only torch is installed.
"""

import importlib
import inspect
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from linattn._version import __version__
from linattn.lab.commands import COMMANDS
from linattn.lab.screen import Screen
from linattn.support.config import Config, alternatives, option, option_of
from linattn.support.extras import MissingExtraError
from linattn.support.options import OptionError

BAD_OPTION, INTERRUPTED = 2, 130
LAST = {"Machine": 98, "Output": 99}  # panels that all commands have stand below those of their own


@dataclass(frozen=True, kw_only=True)
class Common(Config):
    """The options that all commands have."""

    config: Path | None = option(None, "A TOML file with options; those of the command line win.", group="Output")
    json: bool = option(False, "Print the results as JSON, and nothing else.", group="Output")
    quiet: bool = option(False, "Print nothing but errors.", group="Output")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name; returns its exit code."""
    from cyclopts import CycloptsError

    words = list(sys.argv[1:] if arguments is None else arguments)
    name = command_name(words)
    if name == "compare" and any(word.partition("=")[0] == "--task" for word in words):
        name, words = "compare text", ["compare", "text", *words[1:]]
    try:
        app = create_app(name, "--help-all" in words)
        plain = ["--help" if word == "--help-all" else word for word in words]
        return int(app(plain, exit_on_error=False, print_error=False) or 0)
    except OptionError as error:
        own = next((option_of(own) for own in fields(load(name)) if own.name == error.option), None)
        said = f"{error.option.upper() if own and own.argument else flag(error.option)}: {error.message}"
    except CycloptsError as error:
        said = " ".join(str(error).replace("Unknown option:", "there is no option").split())
    except MissingExtraError as error:
        print(f"Error: {error}", file=sys.stderr)
        return BAD_OPTION
    except KeyboardInterrupt:
        print("Interrupted; what is finished is kept. The same command goes on.", file=sys.stderr)
        return INTERRUPTED
    print(f"Error: {said}", f"Try '{' '.join(['linattn', *name.split()])} --help'.", sep="\n", file=sys.stderr)
    return BAD_OPTION


def command_name(words: Sequence[str]) -> str:
    """The longest name in the table of commands with which a command line starts."""
    leading = [" ".join(words[:count]) for count in (2, 1)]
    return next((name for name in leading if name in COMMANDS), "")


def load(name: str) -> type[Config]:
    """The config of a command; its module is imported now."""
    module, _, cls = COMMANDS[name].config.partition(":")
    found: type[Config] = getattr(importlib.import_module(module), cls)
    return found


def create_app(name: str = "", everything: bool = False) -> Any:
    """The whole command line; of the commands only ``name`` is imported, the others show their line of the table."""
    from cyclopts import App

    app = App(
        name="linattn",
        help="Linear attention for PyTorch.",
        version=__version__,
        version_flags=["--version"],
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.register_install_completion_command(name="--install-completion")
    groups = {"": app}
    for title, command in COMMANDS.items():
        first, _, second = title.rpartition(" ")
        if first not in groups and first in COMMANDS:
            groups[first] = app[first]
        elif first not in groups:
            groups[first] = App(name=first, help=command.group, help_format="plaintext")
            app.command(groups[first])
        config = load(title) if title == name else None
        run = _function(config, everything) if config else _not_loaded
        groups[first].command(run, name=second, help=_help(config, everything) if config else command.summary)
    return app


def _not_loaded() -> None:
    """Stands for a command that is not the one that is called."""


def _help(config: type[Config], everything: bool) -> str:
    parts = inspect.cleandoc(config.__doc__ or "").partition("\n\nExample:")[0].split("\n\n")
    text = "\n\n".join(" ".join(part.split()) for part in parts)
    rare = any(option_of(own).rare for own in fields(config))
    return text + ("\n\n--help-all shows all options." if rare and not everything else "")


def _function(config: type[Config], everything: bool) -> Any:
    """A function with a parameter for each field, whose annotations tell cyclopts names, help and panels."""
    own = [field for field in (*fields(config), *fields(Common)) if not option_of(field).hidden]
    hints = get_type_hints(config) | get_type_hints(Common)
    arguments = [field.name for field in own if option_of(field).argument]
    # Texts of a field that is repeated may have commas; others are joined by them.
    joined = {field.name for field in own if _is_tuple(hints[field.name]) and not option_of(field).repeated}

    def run(*positional: Any, **given: Any) -> int:
        given |= dict(zip(arguments, positional, strict=False))
        given = {key: ",".join(value) if key in joined else value for key, value in given.items() if value is not None}
        common = Common(**{field.name: given.pop(field.name) for field in fields(Common) if field.name in given})
        made: Any = config.parse(read_config(common.config) | given)
        return int(made.run(Screen(quiet=common.quiet, as_json=common.json)))

    panels = list(dict.fromkeys(option_of(field).group for field in own))
    parameters = [_parameter(field, hints[field.name], panels, everything) for field in own]
    run.__signature__ = inspect.Signature(sorted(parameters, key=lambda one: one.kind))  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__name__ = config.__name__
    return run


def _parameter(field: Field[Any], hint: Any, panels: list[str], everything: bool) -> inspect.Parameter:
    from cyclopts import Group, Parameter

    rule, default, is_bool = option_of(field), _shown_default(field), alternatives(hint)[0][0] is bool
    choices = f" One of {', '.join(map(str, rule.allowed()))}." if rule.choices and not callable(rule.choices) else ""
    shown = Parameter(
        name=None if rule.argument else flag(field.name),
        help=rule.help + choices,
        group=Group(rule.group or "Options", sort_key=LAST.get(rule.group, panels.index(rule.group))),
        show_default=(lambda value: default) if default else False,
        negative=None if is_bool and rule.group != "Output" else (),
        show=everything or not rule.rare,
        required=field.default is MISSING and field.default_factory is MISSING,
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if rule.argument else inspect.Parameter.KEYWORD_ONLY
    typed = list[str] | None if rule.repeated else _typed(hint)
    return inspect.Parameter(field.name, kind, default=None, annotation=Annotated[typed, shown])


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_tuple(hint: Any) -> bool:
    return get_origin(alternatives(hint)[0][0]) is tuple


def _typed(hint: Any) -> Any:
    """What the command line reads: texts, which the config parses, flags, and what may be given again."""
    kind = alternatives(hint)[0][0]
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, Mapping | tuple):
        return list[str] | None
    return kind | None if kind in (bool, int, float, Path) else str | None


def _shown_default(field: Field[Any]) -> str:
    rule, value = option_of(field), field.default if field.default_factory is MISSING else field.default_factory()
    if rule.default_text or value is MISSING or value in (None, False, "", (), {}):
        return rule.default_text
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_config(path: Path | None) -> dict[str, Any]:
    """The options in a TOML file; dashes in names count as underscores."""
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError("config", f"{path} is no TOML file that can be read: {error}") from error
    return {key.replace("-", "_"): value for key, value in found.items()}
