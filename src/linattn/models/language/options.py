"""The options of one block of a language model, checked together before anything is built."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from linattn.layers.attention_options import AttentionOptions
from linattn.layers.attention_parts import ACTIVATIONS
from linattn.layers.canon import check_canon
from linattn.layers.norms import NORMS, OUTPUT_NORMS
from linattn.ops.shared.call import check_choice, check_flag, check_integer, check_number

MLPS = ("swiglu", "gelu")
ATTENTION_NORMS = (None, *OUTPUT_NORMS)
ATTENTION_GATES = (None, *ACTIVATIONS)

# These divide by the sum of their weights, or end in a norm. The output of all others grows with what they remember and
# needs a norm. A second norm after that of ZeroS would scale its heads to 1, which start near 0 in its paper.
NORMED_THEMSELVES = {"softmax", "window", "zeros_softmax", "zeros"}


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
    def attention(self) -> AttentionOptions:
        """The options of its attention layer."""
        return AttentionOptions(
            self.dim, self.num_heads, self.mechanism, self.num_kv_heads, self.causal, self.qkv_bias, self.qk_norm,
            rotary=self.rotary, norm=self.attention_norm, gate=self.attention_gate, proj_bias=self.proj_bias,
            canon=next((letter for letter in "Bb" if letter in (self.canon or "")), None),
            canon_kernel=self.canon_kernel, mechanism_options=self.mechanism_options, impl=self.impl,
        )  # fmt: skip

    @property
    def rotary_width(self) -> int:
        """How many channels of a head rotary positions turn; an even number."""
        return self.attention.rotary_width

    def check(self, called: Mapping[str, str] | None = None) -> None:
        """Raise TypeError or ValueError that names the option, as a config has ``called`` it, and what is allowed."""
        names = dict(called or {})
        check_integer(names.get("mlp_dim", "mlp_dim"), self.mlp_dim)
        check_flag("mlp_bias", self.mlp_bias)
        check_number("dropout", self.dropout, least=0, most=1)
        check_choice("norm", self.norm, NORMS)
        check_choice("mlp", self.mlp, MLPS)
        check_canon(self.canon)
        self.attention.check(names | {"norm": "attention_norm", "gate": "attention_gate"})


def norm_behind(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """``head_rms``, or None if no layer needs a norm; each of ``layers`` is a mechanism's name and its options.

    Example:
        >>> norm_behind([("softmax", {}), ("zeros", {})]), norm_behind([("zeros", {"head_norm": False})])
        (None, 'head_rms')
    """
    alone = all(name in NORMED_THEMSELVES and options.get("head_norm", True) for name, options in layers)
    return None if alone else "head_rms"
