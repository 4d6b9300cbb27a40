"""Theorems about entropies, checked in fp64: on random positive sequences, and on rows of attention.

Statements are those of NaLaFormer, PolaFormer and MirrorLA. The positive-sequence entropy of weights w with the sum W
is ``PSE(w) = -sum_s (w_s / W) log(w_s / W)``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.analysis.attention_map import attention_map
from linattn.analysis.entropy import positive_sequence_entropy as pse
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism

EXACT = 1e-9  # nats that rounding may cost in fp64
SEEN = 1e-3  # nats between the shortest and the longest queries: a smaller change means that the norm has no effect
SPREAD = 0.7  # standard deviation of the log-length of random queries: one in twenty is 4 times as long as the median
Map = Callable[[Tensor], Tensor]
Found = tuple[bool, dict[str, float]]
"""Whether a statement holds, and the numbers that say so."""

# All are increasing and convex on x > 0. They differ in their elasticity x f'(x) / f(x).
RISING: dict[str, Map] = {"exp(x) - 1": torch.expm1, "x + x^2": lambda x: x + x**2, "x exp(x)": lambda x: x * x.exp()}
FALLING: dict[str, Map] = {"x^2 / (1 + x)": lambda x: x**2 / (1 + x)}
HOMOGENEOUS: dict[str, Map] = {
    "relu(x)": torch.relu, "relu(x)^3": lambda x: x.relu() ** 3, "|x|^1.5": lambda x: x.abs() ** 1.5
}  # fmt: skip
BLIND = ("relu", "mirror", "pola", "cosformer", "angular", "hydra")
SHORT, LONG = (0.25, 0.5, 1.0, 2.0), (4.0, 400.0)  # norms below and above which tanh is 1 up to a thousandth


@dataclass(frozen=True)
class Activations:
    """q and k ``(B, H, T, D)`` in fp64, and the other arguments of a call, such as the layer's input ``x (B, T, C)``.
    ``own`` is the mechanism that was called with them, as it was trained; None if there is none."""

    source: str
    layer: str
    q: Tensor
    k: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    own: Mechanism | None = None

    def times(self, scale: float) -> "Activations":
        """The same activations with all queries multiplied by ``scale``."""
        return replace(self, q=scale * self.q)


def random_activations(
    batch: int = 2, heads: int = 4, tokens: int = 64, head_dim: int = 32, seed: int = 0, device: str = "cpu"
) -> Activations:
    """Normal keys, and queries in random directions whose lengths are log-normal around ``sqrt(D)``."""
    shape, generator = (batch, heads, tokens, head_dim), torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, x = draw(*shape), draw(*shape), draw(batch, tokens, heads * head_dim)
    q = head_dim**0.5 * q / q.norm(dim=-1, keepdim=True) * (SPREAD * draw(*shape[:3], 1)).exp()
    return Activations("random", "random", q.to(device), k.to(device), {"x": x.to(device)})


def attention_rows(mechanism: Mechanism, activations: Activations) -> Tensor:
    """Weights ``(B, H, T, T)``."""
    return attention_map(mechanism, activations.q, activations.k, **activations.arguments)


def means(name: str, values: Sequence[float], path: Tensor) -> dict[str, float]:
    """Mean entropies along a path ``(steps, ...)``, by the value of each step."""
    found = path.mean(tuple(range(1, path.dim()))).tolist()
    return {f"pse_{name}={value:g}": mean for value, mean in zip(values, found, strict=True)}


def rises(path: Tensor) -> int:
    """Number of steps ``(steps, ...)`` along which an entropy does not fall."""
    return int((path.diff(dim=0) >= 0).sum())


def falling(values: Iterable[float]) -> bool:
    return all(after < before for before, after in pairwise(values))


# A statement is the docstring of the function that checks it. On sequences x (sequences, length):


def exponential(x: Tensor) -> Found:
    """exp sharpens with a scale: d PSE(exp(c x)) / dc = -c Var(x) under softmax(c x) < 0"""
    factors = (0.5, 1.0, 2.0, 4.0, 8.0)
    path = torch.stack([pse((c * (x - x.amax(-1, keepdim=True))).exp()) for c in factors])
    return slopes("c", factors, path, x, lambda c: (c * x).exp(), x, 1.5)


def power(x: Tensor) -> Found:
    """a power lowers the entropy: d PSE(x^p) / dp = -p Var(log x) under x^p / sum x^p < 0"""
    powers = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return slopes("p", powers, torch.stack([pse(x**p) for p in powers]), x, lambda p: x**p, x.log(), 2.5)


def slopes(
    name: str, values: Sequence[float], path: Tensor, x: Tensor, weights: Map, exponent: Tensor, at: float
) -> Found:
    """Whether the entropies along a path fall in all sequences, and autograd's slope at one value is ``-t Var``."""
    t = x.new_full((len(x), 1), at, requires_grad=True)  # one t per sequence, so that one pass gives all slopes
    w = weights(t)
    found = torch.autograd.grad(pse(w).sum(), t)[0].squeeze(-1)
    p = (w / w.sum(-1, keepdim=True)).detach()
    mean = (p * exponent).sum(-1, keepdim=True)
    error = float((found + at * (p * (exponent - mean).square()).sum(-1)).abs().amax())
    numbers = {"sequences": len(x), "rises": rises(path), "slope_error": error, **means(name, values, path)}
    return rises(path) == 0 and error < EXACT, numbers


def homogeneous(x: Tensor) -> Found:
    """where f(c x) = c^p f(x), a scale leaves the entropy: PSE(f(c x)) = PSE(f(x))"""
    changes = {name: max(float((pse(f(c * x)) - pse(f(x))).abs().amax()) for c in (0.01, 0.3, 7.0, 100.0))
               for name, f in HOMOGENEOUS.items()}  # fmt: skip
    return max(changes.values()) < EXACT, changes


def convex_from_zero(x: Tensor) -> Found:
    """convex, increasing and f(0) = 0, so f(x) / x rises: PSE(f(x)) < PSE(x)"""
    falls = {f"least fall, {name}": float((pse(x) - pse(f(x))).amin()) for name, f in (RISING | FALLING).items()}
    return min(falls.values()) > 0, falls


def offset(x: Tensor) -> Found:
    """f' > 0 and f'' > 0 alone do not lower it: x^2 + 100 raises the entropy, as f(0) > 0"""
    rise = float((pse(x**2 + 100) - pse(x)).amin())
    return rise > 0, {"least rise": rise}


def elasticity(x: Tensor) -> Found:
    """longer is sharper where x f'(x) / f(x) rises, and wider where it falls, as that of the convex x^2 / (1 + x)"""
    factors = (0.25, 1.0, 4.0)
    numbers = {f"rises, {name}": rises(torch.stack([pse(f(c * x)) for c in factors])) for name, f in RISING.items()}
    numbers |= {f"falls, {name}": rises(-torch.stack([pse(f(c * x)) for c in factors])) for name, f in FALLING.items()}
    return sum(numbers.values()) == 0, dict(numbers)


# On rows of attention, of random activations:


def build(name: str, activations: Activations, **options: Any) -> Mechanism:
    _, H, _, D = activations.q.shape
    return create_mechanism(name, num_heads=H, head_dim=D, **options).to(activations.q)


def entropies(mechanism: Mechanism, activations: Sequence[Activations]) -> Tensor:
    return torch.stack([pse(attention_rows(mechanism, each)) for each in activations])


def softmax(activations: Activations) -> Found:
    """softmax: every row is sharper when its query is longer"""
    scales = (0.1, 0.3, 1.0, 3.0)
    path = entropies(build("softmax", activations, impl="reference"), [activations.times(c) for c in scales])
    return rises(path) == 0, {"rows": path[0].numel(), "rises": rises(path), **means("scale", scales, path)}


def largest_change(mechanism: Mechanism, activations: Activations) -> float:
    """Largest change of any row over the scales; flows that weigh different channels of v have separate rows."""
    q, k = activations.q[:1], activations.k[:1]
    maps = [attention_map(mechanism, c * q, k, channels=True).movedim(-2, -1) for c in (1.0, 0.1, 0.5, 2.0, 10.0)]
    middle, *others = map(pse, maps)
    return max(float((entropies - middle).abs().amax()) for entropies in others)


def blind(activations: Activations) -> Found:
    """homogeneous features under a row sum: no row changes with the length of its query"""
    changes = {name: largest_change(build(name, activations), activations) for name in BLIND}
    return max(changes.values()) < EXACT, changes


def blind_at_start_only(activations: Activations) -> Found:
    """pola with unequal powers and mirror with a modulation are not homogeneous: rows change with the length"""
    # Both are homogeneous as they start, until training moves their parameters.
    made = {name: build(name, activations) for name in ("pola", "mirror")}
    for name, parameter in (("pola", "power"), ("mirror", "amplitude")):
        made[name].get_parameter(parameter).data.normal_()
    changes = {name: largest_change(mechanism, activations) for name, mechanism in made.items()}
    return min(changes.values()) > SEEN, changes


def mirror(activations: Activations) -> Found:
    """fixed mirrors keep q.k over all heads, and their rows are those of relu on reflected queries and keys"""
    reflecting, relu = build("mirror", activations, modulation="none"), build("relu", activations)
    q, k = activations.q, activations.k
    with torch.no_grad():
        turned = reflecting.truncated(q, k)
    assert turned is not None
    one = attention_rows(reflecting, activations)
    other = attention_rows(relu, Activations("", "", *turned))
    tiny = torch.finfo(one.dtype).tiny
    one, other = (weights / weights.sum(-1, keepdim=True).clamp(min=tiny) for weights in (one, other))
    products = torch.einsum("bhtd,bhsd->bts", *turned) - torch.einsum("bhtd,bhsd->bts", q, k)
    off = {"rows": float((one - other).abs().amax()), "products": float(products.abs().amax())}
    return max(off.values()) < EXACT, off


def nala(activations: Activations) -> Found:
    """nala: rows are sharper as the norm grows to 2; past 4, where tanh is 1, they no longer change"""
    norms, lengths = (*SHORT, *LONG), activations.q.norm(dim=-1, keepdim=True)
    path = entropies(build("nala", activations), [replace(activations, q=c * activations.q / lengths) for c in norms])
    numbers = means("norm", norms, path)
    mean = list(numbers.values())
    numbers["share_of_rows_sharper"] = float((path[len(SHORT) - 1] < path[0]).double().mean())
    numbers["change_past_4"] = after = abs(mean[-1] - mean[-2])
    return falling(mean[: len(SHORT)]) and after < 0.01 * (mean[0] - mean[-1]), numbers


def power_of_features(activations: Activations) -> Found:
    """a higher power of the features makes rows sharper"""
    powers, found = (1.0, 2.0, 3.0, 5.0), []
    for name in ("focused", "nala"):
        path = torch.cat([entropies(build(name, activations, power=p), [activations]) for p in powers])
        found.append(means(f"{name}_power", powers, path))
    return all(falling(each.values()) for each in found), found[0] | found[1]


def mala(activations: Activations) -> Found:
    """mala: rows sum to 1 and grow sharper with the length of the query, in their positive part"""
    mechanism, scales = build("mala", activations), (0.1, 1.0, 10.0)
    path = torch.stack([attention_rows(mechanism, activations.times(c)) for c in scales])
    numbers = means("scale", scales, pse(path))
    off = float((path.sum(-1) - 1).abs().amax())
    return falling(numbers.values()) and off < 1e-4, numbers | {"sum_off_by": off}


def polarity(activations: Activations) -> Found:
    """q.k is what meets with equal sign less what meets with opposite sign"""
    q, k = activations.q, activations.k
    same = q.relu() @ k.relu().mT + (-q).relu() @ (-k).relu().mT
    opposite = q.relu() @ (-k).relu().mT + (-q).relu() @ k.relu().mT
    off = float((same - opposite - q @ k.mT).abs().amax())
    return off < EXACT, {"off_by": off, "share_opposite": float(opposite.sum() / (same + opposite).sum())}


# Theorems are about every single row or sequence, means about means over rows.
CHECKS: tuple[tuple[str, Callable[[Any], Found], str], ...] = (
    ("theorem", exponential, "signed"), ("theorem", power, "positive"), ("theorem", homogeneous, "signed"),
    ("theorem", convex_from_zero, "positive"), ("counterexample", offset, "positive"),
    ("theorem", elasticity, "positive"), ("theorem", softmax, "rows"), ("theorem", blind, "rows"),
    ("counterexample", blind_at_start_only, "rows"), ("theorem", mirror, "rows"), ("mean", nala, "rows"),
    ("mean", power_of_features, "rows"), ("mean", mala, "rows"), ("theorem", polarity, "rows"),
)  # fmt: skip


def check_all(activations: Activations, seed: int = 0, count: int = 256, length: int = 64) -> list[dict[str, Any]]:
    """A row for each statement, checked on ``count`` sequences of ``length`` numbers or on random activations of an
    even width.

    Example:
        >>> [row["name"] for row in check_all(random_activations(tokens=16)) if not row["passed"]]
        []
    """
    generator = torch.Generator().manual_seed(seed)
    signed = torch.randn(count, length, generator=generator, dtype=torch.float64)
    third = count // 3  # absolute normal, log-normal and uniform sequences
    uniform = 1 - torch.rand(count - 2 * third, length, generator=generator, dtype=torch.float64)
    positive = torch.cat([signed[:third].abs(), signed[third : 2 * third].exp(), 2 * uniform])
    given, rows = {"signed": signed, "positive": positive, "rows": activations}, []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for kind, check, on in CHECKS:
            passed, numbers = check(given[on])
            rows.append({"name": check.__name__, "kind": kind, "statement": check.__doc__, "passed": passed,
                         "numbers": numbers})  # fmt: skip
    return rows
