"""Any mechanism in PyTorch Geometric's GPS layer."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from linattn.layers.attention import Attention
from linattn.support.extras import need


class GraphAttention(nn.Module):
    """Attention over the nodes of each graph: packed ``(N, C)``, or padded ``(B, T, C)`` with ``mask``, True = node.

    Packed nodes of several graphs need their offsets ``ptr (G+1,)``; packed nodes have no padding.

    Args:
        channels: C.
        heads: number of heads; divides C.
        mechanism: a bidirectional name of ``linattn.list_mechanisms()``.
        dropout: dropout rate of the output.
        mechanism_options: options of the mechanism.

    Example:
        >>> import torch
        >>> from linattn.models.graph import GraphAttention
        >>> attention = GraphAttention(16, 2, "mirror")
        >>> attention(torch.randn(7, 16), ptr=torch.tensor([0, 3, 7])).shape
        torch.Size([7, 16])
    """

    def __init__(
        self, channels: int, heads: int = 1, mechanism: str = "elu", *, dropout: float = 0.0,
        mechanism_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)  # not super(): that is the class GPSConv knows, with other parts
        self._create = partial(Attention, channels, heads, mechanism, mechanism_options=mechanism_options)
        self.attention = self._create()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, ptr: Tensor | None = None) -> Tensor:
        if x.ndim == 2:
            if mask is not None:
                raise ValueError("packed nodes (N, C) have no mask: every one of them is real")
            return self.dropout(self.attention(x.unsqueeze(0), cu_seqlens=ptr).squeeze(0))
        if ptr is not None:
            raise ValueError(f"ptr goes with packed nodes (N, C), got x {tuple(x.shape)}")
        return self.dropout(self.attention(x, key_mask=mask))

    def _reset_parameters(self) -> None:
        """Reset all parameters to new initial values; GPSConv calls it by this name."""
        self.attention.load_state_dict(self._create().state_dict())

    __repr__ = nn.Module.__repr__  # not that of the class GPSConv knows


def create_gps_layer(
    channels: int, conv: nn.Module | None, heads: int = 1, *, mechanism: str = "elu",
    mechanism_options: Mapping[str, Any] | None = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """PyTorch Geometric's ``GPSConv(channels, conv, heads, **options)`` with a mechanism as its attention.

    ``options`` are those of GPSConv: ``dropout``, ``act``, ``norm``, ... The layer is called like any GPSConv.
    """
    need("a GPS layer", "torch_geometric")
    from torch_geometric.nn import GPSConv  # type: ignore[import-untyped]

    for name in ("attn_type", "attn_kwargs"):
        if name in options:
            raise TypeError(f"{name} is set by the mechanism: give mechanism and mechanism_options")
    layer = GPSConv(channels, conv, heads=heads, **options)
    layer.attn_type = mechanism
    layer.attn = _known_to_gps()(channels, heads, mechanism, mechanism_options=mechanism_options)
    return layer


@cache
def _known_to_gps() -> type[GraphAttention]:
    """GPSConv only calls attention of two classes and their subclasses: this one is a subclass in name alone."""
    from torch_geometric.nn.attention import PerformerAttention  # type: ignore[import-untyped]

    class KnownGraphAttention(GraphAttention, PerformerAttention):
        pass

    return KnownGraphAttention
