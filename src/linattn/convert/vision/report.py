"""The report of a conversion, by names."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn


@dataclass
class ConversionReport:
    """What a conversion did, with names as in ``model.named_modules()`` and ``model.state_dict()``; prints a summary.

    ``changed``: the attention layers that were replaced, and by what. ``left``: those that were not asked for, and
    attention pools, which are not part of the blocks. ``kept``, ``initialised``: parameters of the changed layers that
    are the model's own, and those that are new. ``dropped``: what the mechanism cannot hold, and why.
    """

    mechanism: str
    changed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Names that differ only in their number share a line: ``blocks.*.attn.qkv.weight (12)``."""
        lines = [f"converted to {self.mechanism}: {len(self.changed)} layers of attention"]
        lines += [f"  changed      {text}" for text in _grouped([f"{n}: {what}" for n, what in self.changed.items()])]
        for title, names in (("left", self.left), ("kept", self.kept), ("initialised", self.initialised)):
            lines += [f"  {title:<12} {text}" for text in _grouped(names)]
        return "\n".join(
            lines + [f"  dropped      {t}" for t in _grouped([f"{n}: {w}" for n, w in self.dropped.items()])]
        )


class Converted(NamedTuple):
    """The given model, changed in place, and the report of the conversion."""

    model: nn.Module
    report: ConversionReport


def _grouped(names: list[str]) -> list[str]:
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
