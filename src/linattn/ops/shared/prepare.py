"""Preparation of inputs before a form takes them, and of its sums afterwards. Shared by all ops."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from linattn.ops.linear.call import FeatureMaps, LinearCall
from linattn.ops.maps.flows import order_queries
from linattn.ops.shared.checks import autocast_dtype
from linattn.ops.shared.types import Normalizer

# exp(-800) is 0 in every dtype: bounding stronger decays, also -inf, changes no result and keeps sums finite.
STRONGEST_DECAY = -800.0


def widen(gate: Tensor) -> Tensor:
    """Cast gates to fp64 if the device has it: they are small tensors, and their sums and differences need digits."""
    return gate.float() if gate.device.type == "mps" else gate.double()


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off, so that sums and states keep their precision; it would round them inside matmuls."""
    if autocast_dtype(like) is None:
        return nullcontext()
    return torch.autocast(like.device.type, enabled=False)


def map_features(q: Tensor, k: Tensor, feature_map: FeatureMaps) -> tuple[Tensor, Tensor]:
    """Features of q and k. Flows become virtual heads, and those of q are ordered by key head, flow and query head."""
    map_q, map_k = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    phi, psi = q if map_q is None else map_q(q), k if map_k is None else map_k(k)
    return (phi if map_q is None else order_queries(phi, map_q.flows, k.shape[1])), psi


def turned(phi: Tensor, psi: Tensor, call: LinearCall) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """The numerator's features, turned, and the denominator's features if they differ.

    Turned features may be negative, and the sum of their products 0, so the denominator keeps unturned ones.
    """
    if call.rotate is None:
        return phi, psi, call.norm_features
    norm_features = call.norm_features
    if norm_features is None and call.normalizer is not None:
        norm_features = phi, psi
    return *call.rotate(phi, psi), norm_features


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the masked tokens of ``x (B, H, T, D)``, whatever they hold (padding may be NaN)."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def log_decay_for(log_decay: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Bound the decay away from -inf, and let masked tokens decay nothing."""
    if log_decay is None:
        return None
    log_decay = log_decay.clamp(min=STRONGEST_DECAY)
    if key_mask is None:
        return log_decay
    padding = ~key_mask[:, None, :]
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(-1, -1, key_mask.shape[1])
    return log_decay.masked_fill(padding if log_decay.ndim == 3 else padding.unsqueeze(-1), 0)


def log_input_for(log_input: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Set ``log_input`` to 0 at masked tokens, which may hold anything, NaN too."""
    if log_input is None or key_mask is None:
        return log_input
    return log_input.masked_fill(~key_mask[:, None, :], 0)


def weigh(psi: Tensor, log_input: Tensor | None) -> Tensor:
    """Features ``(B, H_kv, T, K)`` times ``exp(log_input) (B, H_kv, T)``, rounded once."""
    if log_input is None:
        return psi
    weights = log_input.to(torch.promote_types(psi.dtype, torch.float32)).exp()
    return (psi.to(weights.dtype) * weights.unsqueeze(-1)).to(psi.dtype)


def normalize(numerator: Tensor, denominator: Tensor, normalizer: Normalizer, eps: float) -> Tensor:
    if normalizer is None:
        return numerator
    n = (denominator + eps if normalizer == "sum" else denominator.abs().clamp(min=1)).unsqueeze(-1)
    # The sums belong to this call alone: without a gradient they can be divided in place.
    in_place = not (numerator.requires_grad or torch.compiler.is_compiling())
    return numerator.div_(n) if in_place else numerator / n
