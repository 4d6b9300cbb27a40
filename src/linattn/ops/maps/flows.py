"""Flows of a feature map as virtual heads: flow f of a key head is a head of its own with one share of v's channels."""

from torch import Tensor


def order_queries(phi: Tensor, flows: int, kv_heads: int) -> Tensor:
    """Put the queries of a virtual key head together: in ``(B, H flows, T, F)`` flow f of head h is ``h flows + f``."""
    return phi if flows == 1 else phi.unflatten(1, (kv_heads, -1, flows)).transpose(2, 3).flatten(1, 3)


def split_values(v: Tensor, flows: int) -> Tensor:
    """``(B, H_kv, T, V) -> (B, H_kv flows, T, V / flows)``."""
    return v if flows == 1 else v.unflatten(-1, (flows, -1)).movedim(-2, 2).flatten(1, 2)


def split_decay(log_decay: Tensor | None, flows: int) -> Tensor | None:
    """Decays ``(H_kv,)`` or ``(B, H_kv, ..)`` with every head repeated: all flows of a head decay alike."""
    if log_decay is None or flows == 1:
        return log_decay
    return log_decay.repeat_interleave(flows, dim=0 if log_decay.ndim == 1 else 1)


def join_outputs(output: Tensor, flows: int, kv_heads: int) -> Tensor:
    """Join ``(B, H flows, T, V / flows)``, in the order of ``order_queries``, to ``(B, H, T, V)``."""
    if flows == 1:
        return output
    return output.unflatten(1, (kv_heads, flows, -1)).movedim(2, -2).flatten(-2).flatten(1, 2)
