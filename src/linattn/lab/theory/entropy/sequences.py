"""Theorems about entropies of positive sequences, checked on random ones in fp64."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.analysis.entropy import positive_sequence_entropy as pse

EXACT = 1e-9  # nats that rounding may cost in fp64
Map = Callable[[Tensor], Tensor]

# All are increasing and convex on x > 0. They differ in their elasticity x f'(x) / f(x).
RISING: dict[str, Map] = {"exp(x) - 1": torch.expm1, "x + x^2": lambda x: x + x**2, "x exp(x)": lambda x: x * x.exp()}
FALLING: dict[str, Map] = {"x^2 / (1 + x)": lambda x: x**2 / (1 + x)}
OFFSET: dict[str, Map] = {"x^2 + 100": lambda x: x**2 + 100}
HOMOGENEOUS: dict[str, Map] = {
    "relu(x)": torch.relu,
    "relu(x)^3": lambda x: x.relu() ** 3,
    "|x|^1.5": lambda x: x.abs() ** 1.5,
}


@dataclass(frozen=True)
class Check:
    """A statement, whether the numbers support it, and the numbers.

    ``kind`` is ``theorem``, about every single row or sequence; ``counterexample``; or ``mean``, about the mean over
    rows alone.
    """

    name: str
    kind: str
    statement: str
    passed: bool
    numbers: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sequence_checks(seed: int = 0, count: int = 256, length: int = 64) -> list[Check]:
    """Check the theorems on ``count`` sequences of ``length`` numbers.

    Example:
        >>> [check.name for check in sequence_checks() if not check.passed]
        []
    """
    generator = torch.Generator().manual_seed(seed)
    signed = torch.randn(count, length, generator=generator, dtype=torch.float64)
    third = count // 3  # absolute normal, log-normal and uniform sequences
    uniform = 1 - torch.rand(count - 2 * third, length, generator=generator, dtype=torch.float64)
    positive = torch.cat([signed[:third].abs(), signed[third : 2 * third].exp(), 2 * uniform])
    return [
        _exponential(signed),
        _power(positive),
        _homogeneous(signed),
        _from_the_origin(positive),
        _offset(positive),
        _elasticity(positive),
    ]


def _exponential(x: Tensor) -> Check:
    factors = (0.5, 1.0, 2.0, 4.0, 8.0)
    path = torch.stack([pse((c * (x - x.amax(-1, keepdim=True))).exp()) for c in factors])
    error = _slope_error(x, lambda c: (c * x).exp(), x, 1.5)
    return Check(
        "exponential", "theorem", "exp sharpens with a scale: d PSE(exp(c x)) / dc = -c Var(x) under softmax(c x) < 0",
        _rises(path) == 0 and error < EXACT,
        {"sequences": len(x), "rises": _rises(path), "slope_error": error, **_means("pse_c", factors, path)},
    )  # fmt: skip


def _power(x: Tensor) -> Check:
    powers = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    path = torch.stack([pse(x**p) for p in powers])
    error = _slope_error(x, lambda p: x**p, x.log(), 2.5)
    return Check(
        "power", "theorem", "a power lowers the entropy: d PSE(x^p) / dp = -p Var(log x) under x^p / sum x^p < 0",
        _rises(path) == 0 and error < EXACT,
        {"sequences": len(x), "rises": _rises(path), "slope_error": error, **_means("pse_p", powers, path)},
    )  # fmt: skip


def _homogeneous(x: Tensor) -> Check:
    changes = {
        name: max(float((pse(f(c * x)) - pse(f(x))).abs().amax()) for c in (0.01, 0.3, 7.0, 100.0))
        for name, f in HOMOGENEOUS.items()
    }
    return Check(
        "homogeneous", "theorem", "where f(c x) = c^p f(x), a scale leaves the entropy: PSE(f(c x)) = PSE(f(x))",
        max(changes.values()) < EXACT, changes,
    )  # fmt: skip


def _from_the_origin(x: Tensor) -> Check:
    falls = {name: float((pse(x) - pse(f(x))).amin()) for name, f in (RISING | FALLING).items()}
    return Check(
        "convex_from_zero", "theorem", "convex, increasing and f(0) = 0, so f(x) / x rises: PSE(f(x)) < PSE(x)",
        min(falls.values()) > 0, {f"least fall, {name}": fall for name, fall in falls.items()},
    )  # fmt: skip


def _offset(x: Tensor) -> Check:
    ((name, f),) = OFFSET.items()
    rise = float((pse(f(x)) - pse(x)).amin())
    return Check(
        "offset", "counterexample", f"f' > 0 and f'' > 0 alone do not lower it: {name} raises the entropy, as f(0) > 0",
        rise > 0, {"least rise": rise},
    )  # fmt: skip


def _elasticity(x: Tensor) -> Check:
    factors = (0.25, 1.0, 4.0)
    numbers: dict[str, float] = {}
    for name, f in RISING.items():
        numbers[f"rises, {name}"] = _rises(torch.stack([pse(f(c * x)) for c in factors]))
    for name, f in FALLING.items():
        numbers[f"falls, {name}"] = _rises(-torch.stack([pse(f(c * x)) for c in factors]))
    return Check(
        "elasticity", "theorem",
        "longer is sharper where x f'(x) / f(x) rises, and wider where it falls, as that of the convex x^2 / (1 + x)",
        sum(numbers.values()) == 0, numbers,
    )  # fmt: skip


def _rises(path: Tensor) -> int:
    """Number of steps ``(steps, ...)`` along which an entropy does not fall."""
    return int((path.diff(dim=0) >= 0).sum())


def _means(name: str, values: tuple[float, ...], path: Tensor) -> dict[str, float]:
    return {f"{name}={value:g}": float(mean) for value, mean in zip(values, path.mean(1), strict=True)}


def _slope_error(x: Tensor, weights: Map, exponent: Tensor, at: float) -> float:
    """The largest error, over sequences, of autograd's slope against ``-t Var``."""
    t = x.new_full((len(x), 1), at, requires_grad=True)  # one t per sequence, so that one pass gives all slopes
    w = weights(t)
    slopes = torch.autograd.grad(pse(w).sum(), t)[0].squeeze(-1)
    p, e = (w / w.sum(-1, keepdim=True)).detach(), exponent
    mean = (p * e).sum(-1, keepdim=True)
    return float((slopes + at * (p * (e - mean).square()).sum(-1)).abs().amax())
