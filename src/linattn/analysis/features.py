"""The features that a linear mechanism makes of queries and keys, captured where it calls the algebra."""

import copy
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from linattn.mechanisms.base import Call, LinearBase, Mechanism, MechanismOutput
from linattn.ops.linear.call import map_features


class Features(NamedTuple):
    """``phi (B, H, flows, Tq, F)`` of the queries, ``psi (B, H, flows, Tk, F)`` of the keys they read."""

    phi: Tensor
    psi: Tensor


def pairwise_features(mechanism: Mechanism, q: Tensor, k: Tensor, *, x: Tensor | None = None) -> Features | None:
    """Features phi and psi whose products ``phi_t . psi_s`` are the unnormalised weights, per head and flow.

    They are what the mechanism passes to ``linear_attention``, before any rotation there, for q ``(B, H, Tq, D)`` and
    k ``(B, H_kv, Tk, D)``. ``pola`` and ``pola_plus`` have two flows, others one. The result is None for mechanisms
    that do not end in that call. In ``hydra`` heads are channels, and these features are a constant.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> pairwise_features(create_mechanism("pola", num_heads=2, head_dim=8), q, k).phi.shape
        torch.Size([1, 2, 2, 5, 16])
    """
    if not isinstance(mechanism, LinearBase):
        return None
    seen: list[dict[str, Any]] = []

    def take(call: Call, arguments: dict[str, Any]) -> MechanismOutput:
        seen.append(arguments)
        raise _TakenError

    listening = copy.copy(mechanism)  # shares the parameters; only its call of the algebra is replaced
    listening.linear = take  # type: ignore[method-assign]
    with suppress(_TakenError):
        listening.attend(q, k, k, Call(mechanism.impl, x=x))
    if not seen:
        return None
    phi, psi = map_features(seen[0]["q"], seen[0]["k"], seen[0].get("feature_map"))
    H, H_kv = q.shape[1], k.shape[1]
    if phi.shape[2] != q.shape[2] or psi.shape[2] != k.shape[2] or phi.shape[1] % H or phi.shape[1] % psi.shape[1]:
        return None
    flows = phi.shape[1] // H
    psi = psi.repeat_interleave(phi.shape[1] // psi.shape[1], dim=1)
    # Virtual heads are ordered by key head, then flow, then the query heads that share both.
    heads = (H_kv, flows, H // H_kv)
    return Features(*(t.unflatten(1, heads).transpose(2, 3).flatten(1, 2) for t in (phi, psi)))


class _TakenError(Exception):
    """Raised where the mechanism calls the algebra, as the rest of it is not needed."""
