"""Learned features of the linear part: ``(B, H, T, D) -> (B, H, T, F)``, per head, non-negative, computed in fp32.

Queries and keys have separate maps, except with random features, which approximate a single kernel.
"""

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.ops.shared.call import compute_dtype, without_autocast

LARGEST_EXPONENT = 40.0  # of each of two factors, so that their product stays finite in fp32


class FeaturePair(Protocol):
    """Maps queries and keys to their features, and knows how many these are."""

    num_features: int

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]: ...


class SeparateMaps(nn.Module):
    """A map for the queries and another one for the keys."""

    def __init__(self, query_map: "HeadMap", key_map: "HeadMap") -> None:
        super().__init__()
        self.query_map, self.key_map = query_map, key_map
        self.num_features = key_map.num_features

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        alike = q.dtype == k.dtype and type(self.query_map) is type(self.key_map)
        if q.shape[2] != 1 or not alike or _hooked(self.query_map) or _hooked(self.key_map):
            return self.query_map(q), self.key_map(k)
        # For one token the number of operations matters, not their size: the heads of q and k are mapped together.
        pairs = zip(self.query_map.tensors(), self.key_map.tensors(), strict=True)
        both = self.key_map.features(torch.cat([q, k], 1), *(torch.cat(pair) for pair in pairs))
        phi, psi = both.split([q.shape[1], k.shape[1]], 1)
        return phi, psi


def _hooked(module: nn.Module) -> bool:
    """Whether hooks wait for a call of the module itself, to watch it or to bring its offloaded weights."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


class HeadMap(nn.Module, ABC):
    """Base of the learned maps: weights ``W (H, D, F)``, and arithmetic that is never in 16 bits."""

    signs = 1  # number of features per column of W

    def __init__(self, num_heads: int, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, feature_dim))
        self.num_features = self.signs * feature_dim
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W uniformly in ``+-D^-0.5``, as in a linear layer."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def start_at_identity(self) -> None:
        """Let the first columns pass the channels on; further columns, if any, stay as they are."""
        with torch.no_grad():
            D, width = self.weight.shape[1:]
            self.weight[..., : min(D, width)] = torch.eye(D, width)[:, : min(D, width)]

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x, *self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """The learned tensors, with heads as their first axis."""
        return (self.weight,)

    def features(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The features of x for any number of heads, whose learned tensors are given."""
        with without_autocast(x):
            x = x.to(compute_dtype(x))
            return self.mapped(x, *(each.to(x.dtype) for each in tensors))

    @abstractmethod
    def mapped(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The features of x, with x and all tensors in one dtype."""

    def extra_repr(self) -> str:
        num_heads, head_dim, feature_dim = self.weight.shape
        return f"num_heads={num_heads}, head_dim={head_dim}, feature_dim={feature_dim}"


class NPMap(HeadMap):
    """Norm-preserving map of STILL: learns the direction, keeps the norm of the input.

    ``phi(x) = [softmax(u), softmax(-u)]``, ``u = |x| f(x) / |f(x)|``, ``f(x) = (x - 2 (x . n) n) W``, or ``x W``

    W starts as the identity or, with ``householder``, as the reflection by n, which cancels the other: u starts as x.
    """

    signs = 2

    def __init__(self, num_heads: int, head_dim: int, feature_dim: int, *, householder: bool = False) -> None:
        super().__init__(num_heads, head_dim, feature_dim)
        self.normal = nn.Parameter(torch.randn(num_heads, head_dim)) if householder else None
        self.start_at_identity()
        if self.normal is not None:
            with torch.no_grad():
                self.weight.copy_(_reflected(self.weight.mT.clone(), self.normal).mT)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.normal is None else (self.weight, self.normal)

    def mapped(self, x: Tensor, *tensors: Tensor) -> Tensor:
        weight, *normal = tensors
        f = (_reflected(x, *normal) if normal else x) @ weight
        u = F.normalize(f, dim=-1) * torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return both_signs(u)


def _reflected(x: Tensor, normal: Tensor) -> Tensor:
    n = F.normalize(normal, dim=-1).unsqueeze(-1)  # (H, D, 1)
    return x - 2 * (x @ n) * n.mT


class HedgehogMap(HeadMap):
    """``phi(x) = [softmax(x W), softmax(-x W)]``; W starts as the identity if F = D, else uniform in ``+-D^-0.5``.

    LoLCATs' own start is closer to 0: its initialiser takes a tensor ``(H, D, F)`` to have ``D F`` inputs, so W is
    uniform in ``+-(6 / (D F))^0.5``: 0.027 for D = 128 and F = 64, where this map has 0.088.
    """

    signs = 2

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight.shape[1] == self.weight.shape[2]:
            self.start_at_identity()

    def mapped(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return both_signs(x @ tensors[0])


class T2RMap(HeadMap):
    """``phi(x) = relu(x W + b)``; b starts at 0."""

    def __init__(self, num_heads: int, head_dim: int, feature_dim: int) -> None:
        super().__init__(num_heads, head_dim, feature_dim)
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, feature_dim))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.bias

    def mapped(self, x: Tensor, *tensors: Tensor) -> Tensor:
        weight, bias = tensors
        return (x @ weight + bias).relu()


class RandomFeatures(nn.Module):
    """Positive random features of the kernel ``exp(q . k / sqrt(D))``, learned: one set for queries and keys.

    ``phi(x)_m = sqrt(alpha_m / M) exp(z_m . x / D^{1/4} - |x|^2 / (2 sqrt(D)))``

    ``z (H_kv, M, D)`` starts normal and ``log_alpha (H_kv, M)`` at 0. Query heads share the z of their key head.

    Softmax attention does not change when a constant c is subtracted from all keys, and features of short vectors
    vary less: ``center (H_kv, D)`` is this constant and ``log_unit (H_kv,)`` the logarithm of a unit of the keys'
    features, both 0 until :meth:`calibrate` sets them. The queries' features compensate for both.

    Args:
        relative: divide the features of each query by the largest of them. Only for attention whose denominator has the
            same factor, so that it cancels, and never beside exact logits: there features need their true values, to be
            compared to ``e^s`` (``units="one"``). Keys always keep one unit, which a state could not change later.
    """

    center: Tensor
    log_unit: Tensor

    def __init__(self, num_kv_heads: int, head_dim: int, count: int, *, relative: bool = False) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(num_kv_heads, count, head_dim))
        self.log_alpha = nn.Parameter(torch.zeros(num_kv_heads, count))
        self.register_buffer("center", torch.zeros(num_kv_heads, head_dim))
        self.register_buffer("log_unit", torch.zeros(num_kv_heads))
        self.relative, self.num_features = relative, count

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(q), self.keys(k)

    def queries(self, q: Tensor) -> Tensor:
        """``(B, H, T, D) -> (B, H, T, M)``."""
        with without_autocast(q):
            grouped = q.to(compute_dtype(q)).unflatten(1, (self.z.shape[0], -1))
            shift = torch.einsum("bghtd,gd->bght", grouped, self.center.to(grouped)) * q.shape[-1] ** -0.5
            logs = self._logs(grouped) + (shift + self.log_unit.to(grouped)[:, None, None]).unsqueeze(-1)
            if self.relative:
                logs = logs - logs.detach().amax(-1, keepdim=True)
            return logs.clamp(max=LARGEST_EXPONENT).exp().flatten(1, 2)

    def keys(self, k: Tensor) -> Tensor:
        """``(B, H_kv, T, D) -> (B, H_kv, T, M)``."""
        with without_autocast(k):
            k = k.to(compute_dtype(k))
            return self.key_logs(k).clamp(max=LARGEST_EXPONENT).exp()

    def key_logs(self, k: Tensor) -> Tensor:
        centred = k - self.center.to(k)[:, None]
        return self._logs(centred.unsqueeze(2)).squeeze(2) - self.log_unit.to(k)[:, None, None]

    @torch.no_grad()
    def calibrate(self, k: Tensor, key_mask: Tensor | None = None) -> None:
        """Set ``center`` and ``log_unit`` from keys ``(B, H_kv, T, D)`` of real text; z and alpha stay."""
        flat = k.to(compute_dtype(k)).transpose(0, 1).flatten(1, 2)  # (H_kv, B T, D)
        if key_mask is not None:
            flat = flat[:, key_mask.flatten()]
        self.center.copy_(flat.mean(1))
        self.log_unit.zero_()
        self.log_unit.copy_(self.key_logs(flat.unsqueeze(0)).amax(-1)[0].median(-1).values)

    def _logs(self, x: Tensor) -> Tensor:
        """Logarithms of the features of x ``(B, H_kv, G, T, D)``."""
        y = x * x.shape[-1] ** -0.25
        half = (self.log_alpha.to(y) - math.log(self.num_features)) / 2
        return y @ self.z.to(y).mT[:, None] - y.square().sum(-1, keepdim=True) / 2 + half[:, None, None]

    def extra_repr(self) -> str:
        return f"num_kv_heads={self.z.shape[0]}, num_features={self.num_features}, relative={self.relative}"


def both_signs(u: Tensor) -> Tensor:
    """``[softmax(u), softmax(-u)]``."""
    return torch.stack([u, -u], -2).softmax(-1).flatten(-2)
