"""Options that several commands have in common: dataclasses with one field for each option."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from linattn.lab.cli.options import Compile, Device, Graphs, Precision, device_or_default, precision_or_default


@dataclass(kw_only=True)
class MachineOptions:
    """Options of where a model is trained, and in which precision and mode."""

    device: Device = ""
    precision: Precision = ""
    compile: Compile = None
    graphs: Graphs = None

    def changes(self) -> dict[str, Any]:
        """The options as fields of a training config; None: as in the recipe."""
        device = device_or_default(self.device)
        return {
            "device": device,
            "precision": precision_or_default(self.precision, device),
            "compile": device.startswith("cuda") if self.compile is None else self.compile,
            "graphs": self.graphs,
        }


def takes_shared_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function with arguments that are dataclasses of options into a command that typer can read.

    In place of such an argument the command has the options of the dataclass, and the function gets an instance.
    ``without``: shared options that the command does not have; they keep their defaults.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        shared: dict[str, list[str]] = {}  # the options of each argument that is a dataclass
        left_out: set[str] = set()
        for own in inspect.signature(command).parameters.values():
            options = [own.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            if is_dataclass(hints[own.name]):
                every = _options(hints[own.name])
                options = [option for option in every if option.name not in without]
                left_out |= {option.name for option in every} & set(without)
                shared[own.name] = [option.name for option in options]
            parameters += options
        if left_out < set(without):
            raise TypeError(f"no shared option of {command.__name__} is {sorted(set(without) - left_out)[0]!r}")

        @wraps(command)
        def run(**given: Any) -> None:
            values = {
                argument: hints[argument](**{name: given.pop(name) for name in names})
                for argument, names in shared.items()
            }
            command(**given, **values)

        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del run.__wrapped__  # else typer would read the signature of the function
        return run

    return wrap


def _options(kind: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=field.default if field.default_factory is MISSING else field.default_factory(),
        )
        for field in fields(kind)
    ]
