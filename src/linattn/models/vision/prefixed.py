"""Attention with a mechanism that knows of the class token before the plane."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from linattn.layers.attention import Attention
from linattn.layers.plane import check_plane, mechanism_plane, prefix_option


class PrefixedAttention(Attention):
    """:class:`Attention` that passes ``num_prefix_tokens`` to its mechanism, together with the plane after them.

    A plain layer with prefix tokens passes no plane to its mechanism, which then sees a line. LION's snakes need both:
    prefix tokens keep their places at the start of either order, and a selective decay is 1 at them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: str,
        *,
        num_prefix_tokens: int,
        mechanism_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        own = prefix_option(mechanism, num_prefix_tokens, mechanism_options or {})
        super().__init__(
            dim, num_heads, mechanism, num_prefix_tokens=num_prefix_tokens, mechanism_options=own, **options
        )

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spatial_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """Attention of ``x (B, T, C)``, prefix tokens first; ``spatial_shape`` is the plane of the other tokens."""
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens packs sequences into one row, where prefix tokens have no plane behind them")
        x, prefix = self._checked_input(x, key_mask), self.num_prefix_tokens
        check_plane(x.shape[1], spatial_shape, prefix, "a mechanism that knows prefix tokens")
        q, k, v, key_mask, key_shape = self._project(x, key_mask, spatial_shape)
        out = self.mechanism(
            q, k, v, key_mask=key_mask, x=self._mechanism_input(x), rotate=self._rotation(spatial_shape, key_shape),
            spatial_shape=mechanism_plane(self.mechanism, spatial_shape, prefix),
        )  # fmt: skip
        if self.local is not None:
            assert key_shape is not None
            branch = self.local(
                v, spatial_shape=key_shape, output_shape=spatial_shape, key_mask=key_mask, num_prefix_tokens=prefix
            )
            out = out + branch.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        return self._finish(out, x)


def attention_class(mechanism: str, num_prefix_tokens: int) -> type[Attention]:
    """The class of layer for a mechanism with that many tokens before the plane."""
    return PrefixedAttention if prefix_option(mechanism, num_prefix_tokens, {}) else Attention
