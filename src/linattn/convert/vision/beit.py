"""BEiT: scores have a bias by the relative position of two patches, one per layer or shared by all layers."""

from typing import Any

from torch import Tensor, nn

from linattn.convert.vision.attend import holds_bias
from linattn.convert.vision.base import ConvertedAttention, Plan
from linattn.convert.vision.tokens import TokenAttention

TABLE = "a relative position bias"


class BeitAttention(TokenAttention):
    """Converted form of ``timm.models.beit.Attention``."""

    biases = {"relative_position_bias_table": TABLE, "relative_position_index": TABLE}  # noqa: RUF012

    def __init__(self, old: nn.Module, plan: Plan) -> None:
        super().__init__(old, plan)
        self.window_size = old.window_size

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        bias = position_bias(self)
        if shared_rel_pos_bias is not None and holds_bias(self.mechanism):
            bias = shared_rel_pos_bias if bias is None else bias + shared_rel_pos_bias
        return self.finish(self.attend(q, k, v, x, bias=bias, **self._where(x)), x)


def position_bias(layer: ConvertedAttention) -> Tensor | None:
    """The bias ``(1, H, T, T)`` from the layer's table, if it still has one."""
    table: Any = layer.relative_position_bias_table
    if table is None:
        return None
    index: Any = layer.relative_position_index
    return table[index.flatten()].view(*index.shape, -1).permute(2, 0, 1).unsqueeze(0)


def drop_shared_bias(model: nn.Module) -> dict[str, str]:
    """Remove the bias that all layers share from a BEiT in which no layer can use it."""
    dropped: dict[str, str] = {}
    for prefix, host in model.named_modules():
        shared = getattr(host, "rel_pos_bias", None)
        blocks = getattr(host, "blocks", None)
        if not isinstance(shared, nn.Module) or not isinstance(blocks, nn.ModuleList):
            continue
        if all(isinstance(b.attn, BeitAttention) and not holds_bias(b.attn.mechanism) for b in blocks):
            start = f"{prefix}." if prefix else ""
            why = f"{TABLE} is added to scores, and the mechanism has none"
            dropped |= {f"{start}rel_pos_bias.{name}": why for name, _ in shared.named_parameters()}
            host.rel_pos_bias = None
    return dropped
