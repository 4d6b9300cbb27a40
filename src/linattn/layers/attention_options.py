"""The options of an attention layer, checked together before it is built, or after it if they need its mechanism."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from linattn.layers.attention_parts import ACTIVATIONS, KERNELS
from linattn.layers.norms import NORMS, OUTPUT_NORMS
from linattn.layers.rotary import WIDTHS, makes_pairs, turned_channels
from linattn.mechanisms.base import Mechanism, check_direction
from linattn.mechanisms.registry import check_options, mechanism_info
from linattn.ops.shared.call import check_choice, check_flag, check_integer, check_number

LAYER_SETS = ("num_heads", "head_dim", "num_kv_heads", "causal", "impl", "input_dim")


def check_mechanism_options(options: Iterable[str]) -> None:
    """Raise TypeError if the ``options`` of a mechanism have one that its layer sets."""
    for name in options:
        if name in LAYER_SETS:
            raise TypeError(f"mechanism_options must not hold {name!r}: the layer sets it")


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention layer as the caller gave them; see ``Attention``."""

    dim: int
    num_heads: int
    mechanism: str = "elu"
    num_kv_heads: int | None = None
    causal: bool = False
    qkv_bias: bool = True
    qk_norm: str | None = None
    key_position: tuple[int, int] | None = None
    rotary: str | float | None = None
    local: str | None = None
    local_kernel: int = 5
    norm: str | None = None
    gate: str | None = None
    spatial_reduction: int = 1
    proj_bias: bool = True
    num_prefix_tokens: int = 0
    canon: str | None = None
    canon_kernel: int = 4
    mechanism_options: Mapping[str, Any] = field(default_factory=dict)
    impl: str = "auto"

    @property
    def rotary_width(self) -> int:
        """How many channels of a head a sequence's rotary positions turn; an even number."""
        share = 0 if self.rotary is None or isinstance(self.rotary, str) else self.rotary
        return 2 * round(share * (self.dim // self.num_heads) / 2)

    @property
    def plane_parts(self) -> list[str]:
        """The parts that look at the image plane, with their options."""
        rotary = self.rotary if isinstance(self.rotary, str) else None
        asked = {"key_position": self.key_position, "rotary": rotary, "local": self.local}
        parts = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
        return parts + ([f"spatial_reduction={self.spatial_reduction}"] if self.spatial_reduction > 1 else [])

    def check(self, called: Mapping[str, str] | None = None) -> None:
        """Raise TypeError or ValueError that names the option, as a host has ``called`` it, and what is allowed."""
        names = {name: name for name in vars(self)} | dict(called or {})
        kv_heads = ("num_kv_heads",) if self.num_kv_heads is not None else ()
        for name in ("dim", "num_heads", *kv_heads, "local_kernel", "spatial_reduction", "canon_kernel"):
            check_integer(names[name], getattr(self, name))
        check_integer(names["num_prefix_tokens"], self.num_prefix_tokens, 0)
        if self.dim % self.num_heads:
            raise ValueError(
                f"{names['num_heads']} must divide {names['dim']}, got {names['dim']} = {self.dim} and "
                f"{names['num_heads']} = {self.num_heads}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{names['num_kv_heads']} must divide {names['num_heads']} = {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.local_kernel % 2 == 0:
            raise ValueError(f"local_kernel must be odd, so that it has a middle, got {self.local_kernel}")
        for name in ("causal", "qkv_bias", "proj_bias"):
            check_flag(names[name], getattr(self, name))
        for name, allowed in (("qk_norm", NORMS), ("local", KERNELS), ("norm", OUTPUT_NORMS), ("gate", ACTIVATIONS),
                              ("canon", ("B", "b"))):  # fmt: skip
            check_choice(names[name], getattr(self, name), (None, *allowed))
        self._check_rotary()
        grid = self.key_position
        if grid is not None and (
            not isinstance(grid, tuple) or len(grid) != 2 or not all(isinstance(n, int) and n >= 1 for n in grid)
        ):
            raise ValueError(f"key_position must be a grid (height, width), integers >= 1, or None, got {grid!r}")
        if not isinstance(self.mechanism_options, Mapping):
            raise TypeError(f"mechanism_options must be a dict of options, got {self.mechanism_options!r}")
        self._check_mechanism()

    def _check_rotary(self) -> None:
        if not isinstance(self.rotary, int | float) or isinstance(self.rotary, bool):
            check_choice("rotary", self.rotary, (None, *WIDTHS))
            return
        check_number("rotary", self.rotary, least=0, most=1)
        head_dim = self.dim // self.num_heads
        # The channels of an odd head cannot all be paired, and a half is rounded up for some widths, down for others.
        if self.rotary and (self.rotary_width < 2 or (self.rotary == 1 and head_dim % 2)):
            raise ValueError(
                f"rotary={self.rotary} turns pairs of a head's channels, and a head_dim of {head_dim} gives it "
                f"{self.rotary * head_dim:g}: use an even head_dim and a larger share, or rotary=0"
            )

    def _check_mechanism(self) -> None:
        parts, options = self.plane_parts, self.mechanism_options
        if self.causal and parts:
            raise ValueError(f"{parts[0]} looks at the whole image plane and needs causal=False")
        check_mechanism_options(options)
        info = mechanism_info(self.mechanism)
        check_options(info, options, apart=LAYER_SETS)
        check_direction(info, self.causal)
        told = options.get("num_prefix_tokens", 0)
        if options.get("order") == "snake" and told != self.num_prefix_tokens:
            raise ValueError(  # its order runs over the plane only, so it must know how many tokens precede the plane
                f"mechanism_options with order='snake' must hold num_prefix_tokens={self.num_prefix_tokens}, the "
                f"layer's number of tokens before the plane, got {told!r}"
            )
        if self.spatial_reduction > 1 and (info.uses_input or self.canon or self.rotary_width):
            part = f"mechanism {info.name!r} takes a gate" if info.uses_input else "canon and rotary=1.0 take a place"
            raise ValueError(
                f"spatial_reduction={self.spatial_reduction} leaves fewer keys than tokens, but {part} for every key "
                "from its token"
            )
        if isinstance(self.rotary, str) and not info.cls.rotates:
            raise ValueError(f"rotary={self.rotary!r} turns features, and mechanism {info.name!r} has none to turn")

    def check_features(self, mechanism: Mechanism) -> None:
        """Raise unless ``rotary`` can turn as many channels as ``mechanism``, by its own options, gives it."""
        if not isinstance(self.rotary, str):
            return
        channels, width = turned_channels(self.rotary, mechanism)
        if not makes_pairs(channels, width):
            kind = "channels" if mechanism.rotates == "inputs" else "features"
            raise ValueError(
                f"rotary={self.rotary!r} turns {width} of the {channels} {kind} of mechanism {self.mechanism!r} at a "
                f"time, half of them by row and half by column, in pairs: {width} must be a multiple of 4 and divide "
                f"{channels} (head_dim = {mechanism.head_dim})"
            )
