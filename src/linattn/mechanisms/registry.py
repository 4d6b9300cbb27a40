"""The registry: every mechanism by name, with what it can do.

``list_mechanisms``, the contracts, the README's table, the benchmark and the command line all read it, so a new
mechanism is one file in this folder (or an entry point ``linattn.mechanisms`` of another package).
"""

import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from linattn.mechanisms.base import Mechanism

StateGrowth = Literal["constant", "growing", "none"]
Cost = Literal["linear", "quadratic"]


@dataclass(frozen=True)
class MechanismInfo:
    """Registry entry of a mechanism: its class, its paper and what it declares, which the contracts check."""

    name: str
    cls: type[Mechanism]
    paper: str
    year: int
    causal: bool
    bidirectional: bool
    state: StateGrowth  # "none": no recurrent form, no hand-over
    cost: Cost
    uses_input: bool
    revision: int = 1

    @property
    def summary(self) -> str:
        """The first line of the class's docstring."""
        return (inspect.getdoc(self.cls) or "").split("\n", 1)[0].rstrip(".")


_REGISTRY: dict[str, MechanismInfo] = {}
M = TypeVar("M", bound=type[Mechanism])


def register_mechanism(
    name: str,
    *,
    paper: str,
    year: int,
    causal: bool = True,
    bidirectional: bool = True,
    state: StateGrowth = "constant",
    cost: Cost = "linear",
    uses_input: bool = False,
    revision: int = 1,
) -> Callable[[M], M]:
    """Class decorator that puts a :class:`Mechanism` into the registry.

    Args:
        name: the name for ``create_mechanism``; letters, digits and underscores.
        paper: source of the formula, e.g. ``"arXiv:2006.16236"``.
        year: year of that paper.
        causal, bidirectional: which kinds of attention it supports; at least one.
        state: how its state grows with the sequence; ``"none"`` if it has no recurrent form.
        cost: cost of a forward pass in the number of tokens.
        uses_input: whether it needs the layer's input ``x (B, T, input_dim)`` for its gates.
        revision: raised when its results change, so that nothing kept from before is taken for the present.

    Example:
        >>> from linattn import register_mechanism
        >>> register_mechanism("two words", paper="arXiv:2006.16236", year=2020)
        Traceback (most recent call last):
            ...
        ValueError: name must be letters, digits and underscores, got 'two words'
    """
    if not name.isidentifier():
        raise ValueError(f"name must be letters, digits and underscores, got {name!r}")
    if not (causal or bidirectional):
        raise ValueError(f"mechanism {name!r} must declare causal, bidirectional or both")

    def register(cls: M) -> M:
        known = _REGISTRY.get(name)
        # A module that is reloaded registers its own class again; any other class of that name is a clash.
        if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"mechanism {name!r} is registered already, by {known.cls.__module__}")
        info = MechanismInfo(name, cls, paper, year, causal, bidirectional, state, cost, uses_input, revision)
        cls.info = info
        _REGISTRY[name] = info
        return cls

    return register


@cache
def _discover() -> None:
    """Import every module of this folder and the entry points of other packages."""
    import linattn.mechanisms as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for entry in entry_points(group="linattn.mechanisms"):
        try:
            entry.load()
        except Exception as error:  # whatever a foreign module raises must not take this library down with it
            warnings.warn(f"mechanism {entry.name!r} of {entry.value} could not be loaded: {error}", stacklevel=2)


def mechanism_info(name: str) -> MechanismInfo:
    """The registry entry of the mechanism ``name``.

    Example:
        >>> from linattn import mechanism_info
        >>> info = mechanism_info("elu")
        >>> info.paper, info.year, info.state
        ('arXiv:2006.16236', 2020, 'constant')
    """
    _discover()
    if name not in _REGISTRY:
        raise ValueError(f"mechanism must be one of {', '.join(sorted(_REGISTRY))}, got {name!r}")
    return _REGISTRY[name]


def list_mechanisms(
    *,
    causal: bool | None = None,
    bidirectional: bool | None = None,
    state: StateGrowth | None = None,
    cost: Cost | None = None,
    uses_input: bool | None = None,
) -> list[str]:
    """Names of the registered mechanisms, sorted; arguments that are not None select those that declare their value.

    Example:
        >>> from linattn import list_mechanisms
        >>> "elu" in list_mechanisms(causal=True, cost="linear")
        True
    """
    _discover()
    wanted = {"causal": causal, "bidirectional": bidirectional, "state": state, "cost": cost,
              "uses_input": uses_input}  # fmt: skip
    return sorted(
        name
        for name, info in _REGISTRY.items()
        if all(value is None or getattr(info, key) == value for key, value in wanted.items())
    )


def mechanism_options(cls: type[Mechanism]) -> dict[str, Any]:
    """The keyword arguments that a mechanism takes and their defaults (``inspect.Parameter.empty``: required).

    A constructor that passes ``**common`` on also takes what the constructor of its base class takes.
    """
    options: dict[str, Any] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind is not parameter.VAR_KEYWORD:
                options.setdefault(parameter.name, parameter.default)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return options


def check_options(info: MechanismInfo, options: Iterable[str], apart: Collection[str] = ()) -> None:
    """Raise TypeError if one of the ``options`` is not the mechanism's; ``apart``: options that are not to be named."""
    allowed = [name for name in mechanism_options(info.cls) if name not in apart]
    for option in options:
        if option not in allowed:
            takes = ", ".join(allowed) or "none of its own"
            raise TypeError(f"mechanism {info.name!r} has no option {option!r}; it takes {takes}")


def create_mechanism(name: str, **options: Any) -> Mechanism:
    """Build a mechanism by name: ``create_mechanism("elu", num_heads=8, head_dim=64, causal=True)``.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("elu", num_heads=4, head_dim=16, causal=True)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([2, 4, 10, 16])
    """
    info = mechanism_info(name)
    check_options(info, options)
    return info.cls(**options)


COLUMNS = ("mechanism", "what it is", "paper", "causal", "bidirectional", "state", "cost")


def mechanism_rows() -> list[tuple[str, ...]]:
    """One row of plain text per mechanism, in the order of ``COLUMNS``, sorted by name.

    Example:
        >>> from linattn.mechanisms.registry import COLUMNS, mechanism_rows
        >>> rows = {row[0]: dict(zip(COLUMNS, row)) for row in mechanism_rows()}
        >>> rows["elu"]["paper"], rows["softmax"]["cost"]
        ('arXiv:2006.16236 (2020)', 'quadratic')
    """
    rows: list[tuple[str, ...]] = []
    for info in map(mechanism_info, list_mechanisms()):
        summary = info.summary + (" (needs x)" if info.uses_input else "")
        paper = f"{info.paper} ({info.year})"
        marks = ("yes" if supported else "no" for supported in (info.causal, info.bidirectional))
        rows.append((info.name, summary, paper, *marks, info.state, info.cost))
    return rows


def markdown_table() -> str:
    """The table in Markdown, with links to the papers."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, summary, paper, *rest in mechanism_rows():
        link = re.sub(r"^arXiv:(\S+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)
        cells = (f"`{name}`", summary.replace("``", "`").replace("|", "\\|"), link, *rest)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
