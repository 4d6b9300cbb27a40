"""Theorems about entropies, checked in fp64: on random positive sequences, and on rows of attention.

Statements are those of NaLaFormer, PolaFormer and MirrorLA. The positive-sequence entropy of weights w with the sum W
is ``PSE(w) = -sum_s (w_s / W) log(w_s / W)``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.analysis.attention_map import attention_map
from linattn.analysis.entropy import positive_sequence_entropy as pse
from linattn.lab.theory.entropy.activations import SEEN, Activations, attention_rows
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism

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


# Rows of attention, on random activations.

FACTORS = (0.1, 0.5, 2.0, 10.0)
BLIND = ("relu", "mirror", "pola", "cosformer", "angular", "hydra")
SHORT, LONG = (0.25, 0.5, 1.0, 2.0), (4.0, 400.0)  # norms below and above which tanh is 1 up to a thousandth


def attention_checks(activations: Activations, seed: int = 0) -> list[Check]:
    """Check the statements; ``activations`` must be random, of an even width, and not causal."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [
            _softmax(activations),
            _blind(activations),
            _sees_once_trained(activations),
            _mirror(activations),
            _norm_power(activations),
            _feature_power(activations),
            _magnitude(activations),
            _polarity(activations),
        ]


def _build(name: str, activations: Activations, **options: Any) -> Mechanism:
    _, H, _, D = activations.q.shape
    return create_mechanism(name, num_heads=H, head_dim=D, **options).to(activations.q)


def _entropies(mechanism: Mechanism, activations: Activations) -> Tensor:
    return pse(attention_rows(mechanism, activations))


def _softmax(activations: Activations) -> Check:
    mechanism = _build("softmax", activations, impl="reference")
    path = torch.stack([_entropies(mechanism, activations.times(c)) for c in (0.1, 0.3, 1.0, 3.0)])
    rises = int((path.diff(dim=0) >= 0).sum())
    means = [float(mean) for mean in path.mean((1, 2, 3))]
    return Check(
        "softmax", "theorem", "softmax: every row is sharper when its query is longer",
        rises == 0, {"rows": path[0].numel(), "rises": rises, "shortest": means[0], "longest": means[-1]},
    )  # fmt: skip


def _largest_change(mechanism: Mechanism, activations: Activations) -> float:
    """Largest change of any row over the scales; flows that weigh different channels of v have separate rows."""
    one = replace(activations, q=activations.q[:1], k=activations.k[:1])

    def entropies(scale: float) -> Tensor:
        own = one.times(scale)
        return pse(attention_map(mechanism, own.q, own.k, channels=True).movedim(-2, -1))

    middle = entropies(1.0)
    return float(torch.stack([(entropies(c) - middle).abs().amax() for c in FACTORS]).amax())


def _blind(activations: Activations) -> Check:
    changes = {name: _largest_change(_build(name, activations), activations) for name in BLIND}
    return Check(
        "blind", "theorem", "homogeneous features under a row sum: no row changes with the length of its query",
        max(changes.values()) < EXACT, changes,
    )  # fmt: skip


def _sees_once_trained(activations: Activations) -> Check:
    """Two of the mechanisms above are homogeneous only as they start, until training moves their parameters."""
    pola, mirror = _build("pola", activations), _build("mirror", activations)
    with torch.no_grad():
        pola.get_parameter("power").normal_()
        mirror.get_parameter("amplitude").normal_()
    changes = {"pola": _largest_change(pola, activations), "mirror": _largest_change(mirror, activations)}
    return Check(
        "blind_at_start_only", "counterexample",
        "pola with unequal powers and mirror with a modulation are not homogeneous: rows change with the length",
        min(changes.values()) > SEEN, changes,
    )  # fmt: skip


def _mirror(activations: Activations) -> Check:
    mirror, relu = _build("mirror", activations, modulation="none"), _build("relu", activations)
    q, k = activations.q, activations.k
    with torch.no_grad():
        reflected = mirror.truncated(q, k)
    assert reflected is not None
    turned = Activations("", "", *reflected)
    rows = (_normed(attention_rows(mirror, activations)) - _normed(attention_rows(relu, turned))).abs().amax()
    products = (torch.einsum("bhtd,bhsd->bts", *reflected) - torch.einsum("bhtd,bhsd->bts", q, k)).abs().amax()
    return Check(
        "mirror", "theorem",
        "fixed mirrors keep q.k over all heads, and their rows are those of relu on reflected queries and keys",
        max(float(rows), float(products)) < EXACT, {"rows": float(rows), "products": float(products)},
    )  # fmt: skip


def _normed(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _with_norm(activations: Activations, norm: float) -> Activations:
    lengths = activations.q.norm(dim=-1, keepdim=True)
    return Activations("", "", norm * activations.q / lengths, activations.k, activations.x)


def _norm_power(activations: Activations) -> Check:
    nala = _build("nala", activations)
    path = torch.stack([_entropies(nala, _with_norm(activations, norm)) for norm in (*SHORT, *LONG)])
    mean = path.mean((1, 2, 3))
    sharper = float((path[len(SHORT) - 1] < path[0]).double().mean())
    after = float((mean[-1] - mean[-2]).abs())
    return Check(
        "nala", "mean", "nala: rows are sharper as the norm grows to 2; past 4, where tanh is 1, they no longer change",
        bool((mean[: len(SHORT)].diff() < 0).all()) and after < 0.01 * float(mean[0] - mean[-1]),
        {**{f"pse_norm={norm:g}": float(value) for norm, value in zip((*SHORT, *LONG), mean, strict=True)},
         "share_of_rows_sharper": sharper, "change_past_4": after},
    )  # fmt: skip


def _feature_power(activations: Activations) -> Check:
    numbers: dict[str, float] = {}
    falls = []
    for name in ("focused", "nala"):
        powers = (1.0, 2.0, 3.0, 5.0)
        path = [float(_entropies(_build(name, activations, power=p), activations).mean()) for p in powers]
        numbers |= {f"{name}_power={p:g}": value for p, value in zip(powers, path, strict=True)}
        falls += [after < before for before, after in pairwise(path)]
    return Check("power_of_features", "mean", "a higher power of the features makes rows sharper", all(falls), numbers)


def _magnitude(activations: Activations) -> Check:
    mala = _build("mala", activations)
    path = [attention_rows(mala, activations.times(c)) for c in (0.1, 1.0, 10.0)]
    means = [float(pse(weights).mean()) for weights in path]
    off = max(float((weights.sum(-1) - 1).abs().amax()) for weights in path)
    return Check(
        "mala", "mean", "mala: rows sum to 1 and grow sharper with the length of the query, in their positive part",
        means[0] > means[1] > means[2] and off < 1e-4,
        {"pse_shortest": means[0], "pse_middle": means[1], "pse_longest": means[2], "sum_off_by": off},
    )  # fmt: skip


def _polarity(activations: Activations) -> Check:
    q, k = activations.q, activations.k
    same = q.relu() @ k.relu().mT + (-q).relu() @ (-k).relu().mT
    opposite = q.relu() @ (-k).relu().mT + (-q).relu() @ k.relu().mT
    off = float((same - opposite - q @ k.mT).abs().amax())
    return Check(
        "polarity", "theorem", "q.k is what meets with equal sign less what meets with opposite sign",
        off < EXACT, {"off_by": off, "share_opposite": float(opposite.sum() / (same + opposite).sum())},
    )  # fmt: skip
