"""Numbers for readers: one unit per column, so that digits line up."""

from collections.abc import Iterable
from dataclasses import dataclass

Prefixes = tuple[tuple[float, str], ...]
MISSING = "–"
BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True)
class Unit:
    """Formats numbers: ``text = value / factor`` with a fixed number of decimals."""

    factor: float = 1.0
    prefix: str = ""
    decimals: int = 0
    signed: bool = False

    def text(self, value: float | None) -> str:
        if value is None:
            return MISSING
        return f"{value / self.factor:{'+' if self.signed else ''},.{self.decimals}f}".replace("-", "−")


def common_unit(values: Iterable[float | None], prefixes: Prefixes = PREFIXES) -> Unit:
    """The prefix that suits the smallest value other than zero, with decimals that give it three digits.

    ``prefixes``: those of thousands, or ``BINARY`` for bytes.

    Example:
        >>> unit = common_unit([5_500_000, 22_100_000])
        >>> unit.text(5_500_000), unit.text(22_100_000), unit.prefix
        ('5.50', '22.10', 'M')
    """
    smallest = min((abs(value) for value in values if value), default=1.0)
    factor, prefix = _prefix(smallest, prefixes)
    if factor == 1.0:
        return Unit(decimals=0 if smallest >= 100 or smallest == int(smallest) else 1)
    return Unit(factor, prefix, max(3 - len(str(int(smallest / factor))), 0))


def _prefix(value: float, prefixes: Prefixes) -> tuple[float, str]:
    return next((pair for pair in prefixes if abs(value) >= pair[0]), prefixes[-1])


def short(value: float) -> str:
    """Format a number on an axis.

    Example:
        >>> short(2000), short(1500), short(0.25)
        ('2k', '1.5k', '0.25')
    """
    factor, prefix = _prefix(value, PREFIXES)
    return f"{value / factor:.4g}{prefix}"


def binary(value: float) -> str:
    """Format bytes on an axis.

    Example:
        >>> binary(512), binary(4096), binary(3 * 2**20)
        ('512 B', '4 KiB', '3 MiB')
    """
    factor, prefix = _prefix(value, BINARY)
    return f"{value / factor:.3g} {prefix}B"


def listed(names: Iterable[str]) -> str:
    """Join names.

    Example:
        >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
        ('a', 'a and b', 'a, b and c')
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def counted(count: int, word: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
