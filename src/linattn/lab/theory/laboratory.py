"""What laboratories share: options with two defaults."""

from dataclasses import dataclass, field, fields
from typing import Any

from linattn.lab.experiment import Experiment
from linattn.support.config import Option, option


def sized(usual: Any, quick: Any, help: str, **more: Any) -> Any:
    """A field of a :class:`Laboratory` with one default, and another one with ``--quick``."""
    words = [",".join(map(str, size)) if isinstance(size, tuple) else str(size) for size in (usual, quick)]
    rule = Option(help=help, default_text=f"{words[0]}, with --quick {words[1]}", **more)
    return field(default=None, metadata={"option": rule, "sizes": (usual, quick)})


@dataclass(frozen=True, kw_only=True)
class Laboratory(Experiment):
    """The base of laboratories, whose fields may be made by :func:`sized`; what is given wins over ``quick``."""

    quick: bool = option(False, "Small: shows that everything runs.", affects=False)

    def __post_init__(self) -> None:
        for own in fields(self):
            if "sizes" in own.metadata and getattr(self, own.name) is None:
                object.__setattr__(self, own.name, own.metadata["sizes"][self.quick])
        super().__post_init__()
