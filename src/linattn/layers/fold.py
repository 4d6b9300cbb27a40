"""Folding: merging a fixed linear map between a projection and a mechanism into the projection."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from linattn.layers.attention import Attention


def fold_reflection(layer: "Attention") -> None:
    """``W_q <- H W_q``, ``b_q <- H b_q``, likewise for k and its position embedding, and a mechanism without H.

    The mechanism's ``reflection_matrix(keys=...)`` is H of the queries ``(H D, H D)`` or keys ``(H_kv D, H_kv D)``, and
    ``without_reflection()`` the mechanism for queries and keys that are reflected already.
    """
    name = layer.mechanism.info.name
    if not hasattr(layer.mechanism, "reflection_matrix"):
        raise ValueError(f"mechanism {name!r} has no reflection that could be folded into the projections")
    between = {"qk_norm": layer.options.qk_norm, "canon": layer.options.canon, "rotary": layer.rotary_width or None}
    for part in (part for part, value in between.items() if value is not None):
        raise ValueError(
            f"{part}={getattr(layer.options, part)!r} stands between the projections and the reflection, which cannot "
            "be moved past it"
        )
    mechanism: Any = layer.mechanism
    with torch.no_grad():
        for_q, for_k = mechanism.reflection_matrix(), mechanism.reflection_matrix(keys=True)
        if not hasattr(mechanism, "without_reflection"):
            raise ValueError(
                f"mechanism {name!r} cannot leave its reflection out (it has no without_reflection()): folded into the "
                "projections as well, it would act twice"
            )
        nq, nk = for_q.shape[0], for_k.shape[0]
        if layer.qkv is not None:
            _reflect_rows(layer.qkv, for_q, slice(0, nq))
            _reflect_rows(layer.qkv, for_k, slice(nq, nq + nk))
        else:
            assert layer.q is not None
            assert layer.kv is not None
            _reflect_rows(layer.q, for_q, slice(0, nq))
            _reflect_rows(layer.kv, for_k, slice(0, nk))
        if layer.key_position is not None:
            weight = layer.key_position.weight
            weight.copy_(torch.einsum("oc,ncyx->noyx", for_k, weight))
    layer.mechanism = mechanism.without_reflection()


def _reflect_rows(linear: nn.Linear, matrix: Tensor, rows: slice) -> None:
    """Multiply rows of weight and bias by ``matrix``, in fp64, so that the stored product is rounded only once."""
    wide = matrix.double()
    linear.weight[rows] = (wide @ linear.weight[rows].double()).to(linear.weight)
    if linear.bias is not None:
        linear.bias[rows] = (wide @ linear.bias[rows].double()).to(linear.bias)
