"""The options of one block of a language model, checked together before anything is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linattn.layers.attention_options import LAYER_SETS
from linattn.layers.canon import canon_positions
from linattn.layers.gate import ACTIVATIONS
from linattn.layers.norms import NORMS, OUTPUT_NORMS
from linattn.mechanisms.registry import mechanism_info
from linattn.mechanisms.registry import mechanism_options as own_options
from linattn.ops.shared.checks import check_choice, check_groups

MLPS = ("swiglu", "gelu")
ATTENTION_NORMS = (None, *OUTPUT_NORMS)
ATTENTION_GATES = (None, *ACTIVATIONS)


@dataclass(frozen=True)
class BlockOptions:
    """Options of one block.

    Args:
        dim: width of the block, a multiple of ``num_heads``.
        num_heads, num_kv_heads: heads of q, and of k and v.
        mlp_dim: width of the feed-forward part.
        mechanism, mechanism_options, impl: a name of ``linattn.list_mechanisms()``, the options of that mechanism, and
            the form in which it is computed.
        causal: whether a token sees only itself and the past.
        canon, canon_kernel: positions of Canon layers, such as ``"ABCD"``, and the number of tokens each looks at.
        rotary: share of a head's channels that rotary positions turn, 0 to 1. Queries and keys are turned before the
            mechanism maps them to features.
        norm: ``"rms"`` or ``"layer"``, before the attention and before the feed-forward part.
        mlp: ``"swiglu"`` or ``"gelu"``.
        qkv_bias, proj_bias, mlp_bias: whether the linear maps have biases.
        qk_norm, attention_norm, attention_gate: parts of the attention, as ``qk_norm``, ``norm`` and ``gate`` of
            ``linattn.layers.Attention``.
        dropout: rate of dropout on the output of both parts, in training.
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    mechanism: str = "elu"
    mechanism_options: Mapping[str, Any] = field(default_factory=dict)
    impl: str = "auto"
    causal: bool = True
    canon: str | None = None
    canon_kernel: int = 4
    rotary: float = 1.0
    norm: str = "rms"
    mlp: str = "swiglu"
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    attention_norm: str | None = None
    attention_gate: str | None = None
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def rotary_width(self) -> int:
        """How many channels of a head rotary positions turn; an even number."""
        return 2 * round(self.rotary * self.head_dim / 2)

    @property
    def canon_positions(self) -> frozenset[str]:
        return canon_positions(self.canon)

    def check(self) -> None:
        """Raise TypeError or ValueError that names the option and what is allowed."""
        for name in ("dim", "num_heads", "num_kv_heads", "mlp_dim", "canon_kernel"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads must divide dim, got dim = {self.dim} and num_heads = {self.num_heads}")
        check_groups(self.num_heads, self.num_kv_heads)
        for name in ("causal", "qkv_bias", "proj_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("rotary", "dropout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
        # The channels of an odd head cannot all be paired, and a half is rounded up for some widths, down for others.
        if self.rotary and (self.rotary_width < 2 or (self.rotary == 1 and self.head_dim % 2)):
            raise ValueError(
                f"rotary={self.rotary} turns pairs of a head's channels, and a head_dim of {self.head_dim} gives it "
                f"{self.rotary * self.head_dim:g}: use an even head_dim and a larger share, or rotary=0"
            )
        for name, allowed in (("norm", NORMS), ("mlp", MLPS), ("qk_norm", (None, *NORMS)),
                              ("attention_norm", ATTENTION_NORMS), ("attention_gate", ATTENTION_GATES)):  # fmt: skip
            check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.mechanism_options, Mapping):
            raise TypeError(f"mechanism_options must be a dict of options, got {self.mechanism_options!r}")
        for name in self.mechanism_options:
            if name in LAYER_SETS:
                raise TypeError(f"mechanism_options must not hold {name!r}: the model sets it")
        info = mechanism_info(self.mechanism)
        own = [name for name in own_options(info.cls) if name not in LAYER_SETS]
        for name in self.mechanism_options:
            if name not in own:
                takes = ", ".join(own) or "none of its own"
                raise TypeError(f"mechanism {info.name!r} has no option {name!r}; it takes {takes}")
        if not (info.causal if self.causal else info.bidirectional):
            raise ValueError(
                f"mechanism {info.name!r} is only {'bidirectional' if self.causal else 'causal'}, but the model has "
                f"causal={self.causal}"
            )
        canon_positions(self.canon)
