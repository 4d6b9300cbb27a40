"""Entropy of attention rows against the norm of their queries."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.analysis.attention_map import attention_map
from linattn.analysis.entropy import entropy, entropy_norm_correlation, positive_sequence_entropy
from linattn.lab.theory.entropy.activations import Activations
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism

SEEN = 1e-3  # nats between the shortest and the longest queries: a smaller change means that the norm has no effect
BINS = 8


@dataclass(frozen=True)
class Row:
    """One mechanism on the activations of one layer. Entropies are in nats, means over images, heads and queries.

    Attributes:
        source, layer: of the activations.
        trained: whether the mechanism was trained on them; otherwise it is measured as it starts.
        norms, scales: median norm of the queries at each scale.
        pse, entropy: positive-sequence entropy at each scale, and the entropy of absolute weights.
        correlation: Pearson correlation between the entropy and the norm of single queries at scale 1, mean over heads.
        binned_norms, binned_pse: of single queries at scale 1, in bins of equal size.
        keys: the most keys that a query sees; the highest possible entropy is the logarithm of this.
        reason: why there are no numbers; empty if there are.
    """

    source: str
    layer: str
    mechanism: str
    trained: bool
    keys: int
    scales: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    pse: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    correlation: float | None = None
    binned_norms: tuple[float, ...] = ()
    binned_pse: tuple[float, ...] = ()
    reason: str = ""

    @property
    def kind(self) -> str:
        return kind_of(self.pse)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | ({"kind": self.kind} if self.pse else {})


def kind_of(pse: Sequence[float]) -> str:
    """``sharper`` or ``wider`` as queries grow, or ``blind`` if the entropy does not change.

    Example:
        >>> kind_of([4.1, 3.0, 1.0]), kind_of([2.0, 2.0001, 2.0]), kind_of([2.0, 2.1])
        ('sharper', 'blind', 'wider')
    """
    if max(pse) - min(pse) < SEEN:
        return "blind"
    return "sharper" if pse[-1] < pse[0] else "wider"


def fitting_mechanism(name: str, activations: Activations, seed: int) -> Mechanism:
    """The untrained mechanism for the shape of the activations, in fp64; ValueError if it does not fit."""
    (_, H, _, D), H_kv = activations.q.shape, activations.k.shape[1]
    options = {"input_dim": activations.x.shape[-1]} if activations.x is not None else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mechanism = create_mechanism(
            name, num_heads=H, head_dim=D, num_kv_heads=H_kv, causal=activations.causal, **options
        )
    return mechanism.to(activations.q)


def attention_rows(mechanism: Mechanism, activations: Activations) -> Tensor:
    """Weights ``(B, H, rows, Tk)`` of all queries or, if causal, those of the last quarter, which see many keys."""
    weights = attention_map(mechanism, activations.q, activations.k, **activations.map_arguments())
    return weights[:, :, _counting(activations)]


def measure(
    name: str, activations: Activations, scales: tuple[float, ...], *, seed: int = 0, trained: bool = False
) -> Row:
    """Measure a mechanism, or with ``trained`` the activations' own one, at all scales."""
    place = (activations.source, activations.layer, name, trained, activations.k.shape[2])
    try:
        mechanism = activations.own if trained and activations.own is not None else None
        mechanism = mechanism or fitting_mechanism(name, activations, seed)
        maps = {scale: attention_rows(mechanism, activations.times(scale)) for scale in sorted(scales)}
    except ValueError as error:  # not made for this shape or direction, or not linear in v
        return Row(*place, reason=str(error))
    norm = activations.q.norm(dim=-1)[:, :, _counting(activations)]
    single = positive_sequence_entropy(maps[1.0])
    by_head = [r for r in entropy_norm_correlation(single, norm) if r is not None]
    order = norm.flatten().argsort()
    bins = [(norm.flatten()[own].mean(), single.flatten()[own].mean()) for own in order.chunk(BINS)]
    return Row(
        *place,
        scales=tuple(maps),
        norms=tuple(float(scale * norm.median()) for scale in maps),
        pse=tuple(float(positive_sequence_entropy(weights).mean()) for weights in maps.values()),
        entropy=tuple(float(entropy(weights).mean()) for weights in maps.values()),
        correlation=sum(by_head) / len(by_head) if by_head else None,
        binned_norms=tuple(float(mean) for mean, _ in bins),
        binned_pse=tuple(float(mean) for _, mean in bins),
    )


def _counting(activations: Activations) -> slice:
    return slice(3 * activations.q.shape[2] // 4, None) if activations.causal else slice(None)
