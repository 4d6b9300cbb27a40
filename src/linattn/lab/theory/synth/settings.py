"""Settings of a laboratory run: one comparison for each kind of positions."""

from dataclasses import dataclass, replace
from pathlib import Path

from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.support.options import OptionError, check_option

# Kind of positions -> share of a head's channels that rotary positions rotate.
POSITIONS = {"rotary": 1.0, "quarter": 0.25, "none": 0.0}


@dataclass(frozen=True)
class SynthConfig:
    """Mechanisms with and without Canon layers, with and without positions, at some widths, on one task.

    Attributes:
        shared: the comparison; its mechanisms may be written ``gated:none``, with their own kinds of positions.
        positions: kinds of positions for mechanisms that name none.
        metrics: the task's metrics that the table shows; models are compared by the first.
        samples: number of answers or sentences that trained models write, to be checked; 0: none.
        final: False to stop once learning rates are chosen; the table then has the scores that chose them.
    """

    shared: TextCompareConfig
    positions: tuple[str, ...] = ("rotary", "none")
    metrics: tuple[str, ...] = ("accuracy",)
    samples: int = 0
    final: bool = True

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        if not self.final and len(set(self.shared.lrs)) < 2:
            raise OptionError("final", "--no-final shows the runs that choose learning rates: name several with --lr")
        if not self.final and self.samples:
            raise OptionError("samples", "must be 0 with --no-final, which keeps no trained model to write them")
        for part in self.parts.values():
            part.check()

    @property
    def output(self) -> Path:
        return self.shared.output

    @property
    def parts(self) -> dict[str, TextCompareConfig]:
        """A comparison for each kind of positions, in a folder of its own.

        Example:
            >>> config = SynthConfig(TextCompareConfig(patterns=("softmax", "gated:none")))
            >>> {kind: part.patterns for kind, part in config.parts.items()}
            {'rotary': ('softmax',), 'none': ('softmax', 'gated')}
        """
        patterns: dict[str, list[str]] = {}
        for entry in self.shared.patterns:
            pattern, _, own = entry.partition(":")
            for kind in own.split("+") if own else self.positions:
                check_option("positions", kind, POSITIONS)
                patterns.setdefault(kind, []).append(pattern)
        if not patterns:
            raise OptionError("mechanisms", "name at least one, such as softmax or gated:none")
        ordered = [kind for kind in POSITIONS if kind in patterns]
        return {
            kind: replace(
                self.shared,
                patterns=tuple(patterns[kind]),
                host=replace(self.shared.host, rotary=POSITIONS[kind], options=self._options(patterns[kind])),
                output=self.output / f"positions-{kind}",
                keep_weights=self.shared.keep_weights and self.final,
            )
            for kind in ordered
        }

    def _options(self, patterns: list[str]) -> dict[str, dict[str, object]]:
        """Options of the mechanisms that are in the comparison, which refuses any others."""
        there = {name.partition("*")[0] for pattern in patterns for name in pattern.split("/")}
        return {name: dict(own) for name, own in self.shared.host.options.items() if not name or name in there}
