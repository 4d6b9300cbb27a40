"""Statements of the papers about attention rows, checked on random activations in fp64."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.analysis.attention_map import attention_map
from linattn.analysis.entropy import positive_sequence_entropy as pse
from linattn.lab.theory.entropy.activations import Activations
from linattn.lab.theory.entropy.measure import SEEN, attention_rows
from linattn.lab.theory.entropy.sequences import EXACT, Check
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism

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
            _power(activations),
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


def _power(activations: Activations) -> Check:
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
