"""The options of an attention layer, checked together before it is built, or after it if they need its mechanism."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from linattn.layers.gate import ACTIVATIONS
from linattn.layers.local import KERNELS
from linattn.layers.norms import NORMS, OUTPUT_NORMS
from linattn.layers.rotary import WIDTHS, makes_pairs, turned_channels
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import mechanism_info
from linattn.ops.shared.checks import check_choice

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
    mechanism: str
    num_kv_heads: int | None
    causal: bool
    qk_norm: str | None
    key_position: tuple[int, int] | None
    rotary: str | None
    local: str | None
    local_kernel: int
    norm: str | None
    gate: str | None
    spatial_reduction: int
    num_prefix_tokens: int
    mechanism_options: Mapping[str, Any]

    def check(self) -> None:
        """Raise TypeError or ValueError that names the option and what is allowed."""
        for name, least in (("dim", 1), ("num_heads", 1), ("local_kernel", 1), ("spatial_reduction", 1),
                            ("num_prefix_tokens", 0)):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads must divide dim, got dim = {self.dim} and num_heads = {self.num_heads}")
        if self.local_kernel % 2 == 0:
            raise ValueError(f"local_kernel must be odd, so that it has a middle, got {self.local_kernel}")
        for name, allowed in (("qk_norm", NORMS), ("rotary", WIDTHS), ("local", KERNELS), ("norm", OUTPUT_NORMS),
                              ("gate", ACTIVATIONS)):  # fmt: skip
            check_choice(name, getattr(self, name), (None, *allowed))
        self._check_grid()
        check_mechanism_options(self.mechanism_options)
        self._check_parts()

    def _check_grid(self) -> None:
        grid = self.key_position
        if grid is not None and (
            not isinstance(grid, tuple) or len(grid) != 2 or not all(isinstance(n, int) and n >= 1 for n in grid)
        ):
            raise ValueError(f"key_position must be a grid (height, width), integers >= 1, or None, got {grid!r}")

    def _check_parts(self) -> None:
        parts = self.plane_parts
        if self.causal and parts:
            raise ValueError(f"{parts[0]} looks at the whole image plane and needs causal=False")
        self._check_order()
        info = mechanism_info(self.mechanism)
        if self.spatial_reduction > 1 and info.uses_input:
            raise ValueError(
                f"spatial_reduction={self.spatial_reduction} leaves fewer keys than tokens, but mechanism "
                f"{info.name!r} takes a gate for every key from its token"
            )
        if self.rotary is not None and not info.cls.rotates:
            raise ValueError(f"rotary={self.rotary!r} turns features, and mechanism {info.name!r} has none to turn")

    def check_rotary(self, mechanism: Mechanism) -> None:
        """Raise unless ``rotary`` can turn as many channels as ``mechanism``, by its own options, gives it."""
        if self.rotary is None:
            return
        channels, width = turned_channels(self.rotary, mechanism)
        if not makes_pairs(channels, width):
            kind = "channels" if mechanism.rotates == "inputs" else "features"
            raise ValueError(
                f"rotary={self.rotary!r} turns {width} of the {channels} {kind} of mechanism {self.mechanism!r} at a "
                f"time, half of them by row and half by column, in pairs: {width} must be a multiple of 4 and divide "
                f"{channels} (head_dim = {mechanism.head_dim})"
            )

    def _check_order(self) -> None:
        """The snake order runs over the plane only, so the mechanism must know how many tokens precede the plane."""
        told = self.mechanism_options.get("num_prefix_tokens", 0)
        if self.mechanism_options.get("order") == "snake" and told != self.num_prefix_tokens:
            raise ValueError(
                f"mechanism_options with order='snake' must hold num_prefix_tokens={self.num_prefix_tokens}, the "
                f"layer's number of tokens before the plane, got {told!r}"
            )

    @property
    def plane_parts(self) -> list[str]:
        """The parts that look at the image plane, with their options."""
        asked = {"key_position": self.key_position, "rotary": self.rotary, "local": self.local}
        parts = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
        return parts + ([f"spatial_reduction={self.spatial_reduction}"] if self.spatial_reduction > 1 else [])
