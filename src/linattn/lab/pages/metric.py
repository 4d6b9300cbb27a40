"""The metric that mechanisms are compared by, and the words for what else was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric; ``field`` is its name in the results, and ``higher`` says which way is better.

    Example:
        >>> Metric().text(97.3), Metric("score", "bits per byte", "", 3, higher=False).text(1.25)
        ('97.30 %', '1.250')
    """

    field: str = "top1"
    name: str = "top-1"
    unit: str = "%"
    decimals: int = 2
    higher: bool = True

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Metric":
        """The metric that the results name; results of images name none."""
        found = meta.get("metric")
        return cls(**found) if isinstance(found, Mapping) else cls()

    def number(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"

    def text(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}".strip()

    def best(self, means: Mapping[str, float]) -> str:
        """The name with the best mean; among equals the first."""
        return (max if self.higher else min)(means, key=lambda name: means[name])

    @property
    def title(self) -> str:
        """The metric's name as the title of a chart or a column."""
        name = self.name[0].upper() + self.name[1:]
        return f"{name}, {self.unit}" if self.unit else name

    @property
    def extreme(self) -> str:
        return "highest" if self.higher else "lowest"

    def side(self, better: bool) -> str:
        """On which side a better, or worse, run lies."""
        return "above" if better == self.higher else "below"


@dataclass(frozen=True)
class Words:
    """How charts and tables name what the models were trained on."""

    unit: str = "images"
    """The unit that speeds count."""
    one: str = "image"
    round: str = "epoch"
    """The unit that training counts, in records and in words."""
    state: str = "state_size"
    """The field with the size of the state."""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Words":
        return cls("tokens", "sequence", "step", "state_bytes") if meta.get("kind") == "text" else cls()

    def speed(self, training: bool) -> str:
        """Name of the field with a speed."""
        return f"{self.unit}_per_second_{'train' if training else 'forward'}"
