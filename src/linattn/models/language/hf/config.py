"""The config of all language models."""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from linattn.models.language.options import BlockOptions
from linattn.ops.shared.call import check_choice, check_flag, check_integer, check_number

# Options of the config -> their names in BlockOptions.
RENAMED = {"hidden_size": "dim", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
           "intermediate_size": "mlp_dim"}  # fmt: skip
POOLINGS = ("last", "mean")
SHARED = ("impl", "causal", "canon", "canon_kernel", "norm", "mlp", "qkv_bias", "proj_bias", "mlp_bias", "qk_norm",
          "attention_norm", "attention_gate", "dropout")  # fmt: skip
# Keywords that transformers takes besides the fields of a config.
TAKEN_BY_TRANSFORMERS = {"num_labels", "torch_dtype", "name_or_path", "attn_implementation", "output_attentions",
                         "experts_implementation", "per_layer_config", "model_type"}  # fmt: skip


class LinearAttentionConfig(PreTrainedConfig):
    """Configuration of a language model with one mechanism in every layer, or one named for each layer.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: shape of the network.
        num_key_value_heads: heads of k and v (None: as many as of q).
        intermediate_size: width of the feed-forward part. None: for SwiGLU 8/3 of ``hidden_size``, rounded up to a
            multiple of 16; for GELU 4 times ``hidden_size``.
        mechanism: a name of ``linattn.list_mechanisms()``, or a list with one for each layer.
        mechanism_options: a dict with the mechanism's own options, or a list with one such dict for each layer.
        canon: positions of Canon layers, from the letters A, B or b, C, D: ``"ABCD"``, ``"AbCD"`` (None: none). They
            look at the past only, even where the attention is bidirectional.
        rotary: share of a head's channels that rotary positions turn, 0 to 1, or a list with one for each layer.
        rotary_base: base of the rotary frequencies.
        max_position_embeddings: number of learned position vectors, which are added to the token embeddings; no
            sequence may be longer (None: no such vectors and no limit).
        causal: False for encoders.
        pooling: what a classifier reads: ``"last"``, the last token, or ``"mean"``, the mean of all tokens (None:
            last for causal models, mean for encoders).
        dropout: after both branches of a block, on the embeddings, and on what a classifier reads.
        norm, mlp, qkv_bias, proj_bias, mlp_bias, qk_norm, attention_norm, attention_gate, canon_kernel, impl: as
            in ``linattn.models.language.options.BlockOptions``.
        initializer_range: standard deviation of linear maps and embeddings at initialisation. Mechanisms and Canon
            layers are initialised as in their papers.

    Example:
        >>> from linattn.models.language import LinearAttentionConfig
        >>> config = LinearAttentionConfig(num_hidden_layers=3, mechanism=["elu", "elu", "softmax"], canon="ABCD")
        >>> config.block_options(2).mechanism, config.intermediate_size
        ('softmax', 1376)
    """

    model_type = "linattn"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, Trainer adds a list to it

    vocab_size: int = 256
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    mechanism: str | list[str] = "elu"
    mechanism_options: dict[str, Any] | list[dict[str, Any]] | None = None
    impl: str = "auto"
    causal: bool = True
    canon: str | None = None
    canon_kernel: int = 4
    rotary: float | list[float] = 1.0
    rotary_base: float = 10000.0
    max_position_embeddings: int | None = None
    norm: str = "rms"
    mlp: str = "swiglu"
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    attention_norm: str | None = None
    attention_gate: str | None = None
    dropout: float = 0.0
    pooling: str | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None and isinstance(self.hidden_size, int):
            gated = -(-8 * self.hidden_size // 48) * 16
            self.intermediate_size = gated if self.mlp == "swiglu" else 4 * self.hidden_size
        self._refuse_unknown(kwargs)
        self._check_numbers()
        for layer in range(self.num_hidden_layers):
            self.block_options(layer).check({option: name for name, option in RENAMED.items()})
        super().__post_init__(**kwargs)
        if self.causal is False and self.use_cache:
            self.use_cache = False  # an encoder sees the whole sequence at once: nothing follows that could use a cache

    def _check_numbers(self) -> None:
        """Check what no block sees."""
        positions = () if self.max_position_embeddings is None else ("max_position_embeddings",)
        for name in ("vocab_size", "num_hidden_layers", *positions):
            check_integer(name, getattr(self, name))
        pad = self.pad_token_id
        if pad is not None and not -self.vocab_size <= pad < self.vocab_size:
            raise ValueError(f"pad_token_id must be None or below vocab_size = {self.vocab_size}, got {pad}")
        for name in ("tie_word_embeddings", "use_cache"):
            check_flag(name, getattr(self, name))
        check_number("rotary_base", self.rotary_base, above=1)
        check_number("initializer_range", self.initializer_range, above=0)
        check_choice("pooling", self.pooling, (None, *POOLINGS))

    def block_options(self, layer: int) -> BlockOptions:
        """The options of the block with index ``layer``."""
        own = {new: getattr(self, old) for old, new in RENAMED.items()} | {name: getattr(self, name) for name in SHARED}
        return BlockOptions(
            **own,
            mechanism=self._of_layer("mechanism", self.mechanism, layer),
            mechanism_options=self._of_layer("mechanism_options", self.mechanism_options or {}, layer),
            rotary=self._of_layer("rotary", self.rotary, layer),
        )

    def _of_layer(self, name: str, value: Any, layer: int) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        if len(value) != self.num_hidden_layers:
            raise ValueError(
                f"{name} must be one for all layers or a list of num_hidden_layers = {self.num_hidden_layers}, got "
                f"{len(value)} of them"
            )
        return value[layer]

    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        """Raise for unknown keywords of a caller; a config file may come from another version and have further keys."""
        if self.transformers_version is not None:
            return
        known = TAKEN_BY_TRANSFORMERS | set(GenerationConfig().to_dict())
        for name in kwargs:
            if name not in known and not name.startswith("_"):
                options = ", ".join(field for field in LinearAttentionConfig.__annotations__)
                raise TypeError(f"LinearAttentionConfig has no option {name!r}; it takes {options}")
