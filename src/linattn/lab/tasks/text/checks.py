"""Checks of the settings of tasks; errors name the setting and what is allowed."""

from collections.abc import Iterable

from linattn.support.options import SettingError


def at_least(option: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise SettingError(option, f"must be a whole number of at least {low}, got {value!r}")


def between(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise SettingError(option, f"must lie between {low} and {high}, got {value!r}")


def one_of(option: str, value: object, allowed: Iterable[object]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise SettingError(option, f"must be one of {', '.join(map(str, allowed))}, got {value!r}")


def require(option: str, holds: bool, allowed: str, value: object) -> None:
    """Raise SettingError unless ``holds``; ``allowed`` states the condition in words."""
    if not holds:
        raise SettingError(option, f"must be {allowed}, got {value!r}")


def ordered(option: str, value: tuple[int, int], low: int) -> None:
    """Check a range ``(first, last)``, both ends included."""
    fits = len(value) == 2 and low <= value[0] <= value[1]
    require(option, fits, f"(first, last) with {low} <= first <= last", value)
