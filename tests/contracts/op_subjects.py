"""``linear_attention`` with every combination of its options, dressed as mechanisms: the same contracts hold."""

from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import LinearMechanism
from linattn.mechanisms.registry import MechanismInfo
from linattn.ops.maps import EluPlusOne, FeatureMap
from linattn.ops.shared.call import FORMS
from linattn.testing import subject_of
from linattn.testing.cases import Subject


@dataclass(frozen=True)
class Variant:
    """One combination of options of ``linear_attention``."""

    causal: bool
    decay: str  # none, head, token or channel
    decay_index: str | None
    normalizer: str | None
    norm_features: bool
    grouped: bool

    def __str__(self) -> str:
        parts = ["causal" if self.causal else "both_ways", self.decay]
        parts += [self.decay_index] if self.decay_index else []
        parts += [self.normalizer or "no_norm"]
        parts += ["norm_features"] if self.norm_features else []
        return "-".join(parts + (["grouped"] if self.grouped else []))

    @property
    def subject(self) -> Subject:
        return self.at({})

    def at(self, place: dict[str, Any]) -> Subject:
        """As a subject at one of ``PLACES``; on a CPU in each form by name, of which ``auto`` would only repeat one."""
        options = {"num_heads": 4, "num_kv_heads": 2} if self.grouped else {}
        return subject_of(_mechanism(self), **{"impls": FORMS} | place, **options)


DECAYS = [("none", None), *product(("head", "token", "channel"), ("key", "query"))]
NORMALIZERS = [("sum", False), ("sum", True), ("abs_max_one", False), ("abs_max_one", True), (None, False)]

VARIANTS = [
    Variant(causal, *decay, *normalizer, grouped)
    for causal, decay, normalizer, grouped in product((True, False), DECAYS, NORMALIZERS, (False, True))
]
# Every value of an option meets every value of each other option here (a test counts them): for the contracts
# that take too long on all.
COVERING = [
    Variant((i + j) % 2 == 0, *decay, *normalizer, (i + j // 2) % 2 == 1)
    for i, decay in enumerate(DECAYS)
    for j, normalizer in enumerate(NORMALIZERS)
]
# Every decay in both directions: for the contracts that depend on the form alone.
DIRECTIONS = [
    Variant(causal, *decay, "sum", norm_features=i % 2 == 0, grouped=i % 3 == 0)
    for causal in (True, False)
    for i, decay in enumerate(DECAYS)
]

# Every kind of decay in both directions: for what a call is traced into, where the index is a flag that is passed on.
KINDS = [
    Variant(True, "none", None, "sum", norm_features=False, grouped=True),
    Variant(True, "head", "query", "sum", norm_features=False, grouped=False),
    Variant(True, "token", "key", "abs_max_one", norm_features=True, grouped=False),
    Variant(True, "channel", "query", None, norm_features=False, grouped=True),
    Variant(False, "none", None, "sum", norm_features=False, grouped=False),
    Variant(False, "head", "key", "sum", norm_features=True, grouped=True),
    Variant(False, "token", "query", "abs_max_one", norm_features=False, grouped=True),
    Variant(False, "channel", "key", None, norm_features=False, grouped=False),
]


class LinearAttention(LinearMechanism):
    """Parameters and x become the decay, so that its gradient is under contract as well."""

    variant: ClassVar[Variant]

    def __init__(self, num_heads: int, head_dim: int, **common: Any) -> None:
        super().__init__(num_heads, head_dim, **common)
        H, decay = self.num_kv_heads, self.variant.decay
        if decay == "head":
            self.rate = nn.Parameter(torch.linspace(-3, 1, H))
        elif decay != "none":
            self.gate = nn.Linear(self.input_dim, H * (head_dim if decay == "channel" else 1))

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        # A denominator is a sum of positive features here (some rows above 1, some below): else low precision
        # would measure the condition of a quotient, not the form. Signed ones are drawn in drawn.py.
        feature_map: FeatureMap | None = None
        if self.variant.normalizer == "sum":
            feature_map = EluPlusOne()
        elif self.variant.normalizer == "abs_max_one":
            q, k = 0.1 * (F.elu(q) + 1), F.elu(k) + 1
        own = (F.softplus(q), F.softplus(k)) if self.variant.norm_features else None
        return {"q": q, "k": k, "v": v, "feature_map": feature_map, "norm_features": own,
                "normalizer": self.variant.normalizer, "log_decay": self._log_decay(k, x),
                "decay_index": self.variant.decay_index}  # fmt: skip

    def _log_decay(self, k: Tensor, x: Tensor | None) -> Tensor | None:
        if self.variant.decay == "none":
            return None
        if self.variant.decay == "head":
            return -F.softplus(self.rate)
        gates = F.logsigmoid(self.gate(self.input_of(x, k))).unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
        return gates if self.variant.decay == "channel" else gates.squeeze(-1)

    @property
    def num_features(self) -> int:
        return self.head_dim


def _mechanism(variant: Variant) -> type[LinearAttention]:
    cls = type("LinearAttention", (LinearAttention,), {"variant": variant})
    uses_input = variant.decay in ("token", "channel")
    cls.info = MechanismInfo(
        str(variant), cls, "", 0, variant.causal, not variant.causal, "constant", "linear", uses_input
    )
    return cls
