"""What cutting off negative parts costs: energy of queries and keys, and interactions of opposite sign."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, LinearBase, Mechanism, MechanismOutput
from linattn.mechanisms.softmax import Softmax
from linattn.ops.linear.call import map_features
from linattn.ops.shared.rotation import Rotate

IMAGES, TOKENS = 2, 12  # size of the sample on which features are differentiated
ROUNDING = 1e-12  # rounding of fp64 sums of products, relative to the product of their lengths
STEP = 1e-4  # change of a channel, in units of the vectors' size: differences in fp64 then have about 8 digits
COPIES = PAIRED = 64  # channels changed in one call, each in a copy of an image; queries and keys paired up


def energy_lost(mechanism: Mechanism, q: Tensor, k: Tensor, *, rotate: Rotate | None = None) -> list[float | None]:
    """Share of the energy of queries and keys that the mechanism cuts off, for each head.

    ``sum relu(-y)^2 / sum y^2`` over the vectors y that ``mechanism.truncated(q, k)`` returns: those of a head's
    queries and of the keys it reads, for q ``(B, H, Tq, D)`` and k ``(B, H_kv, Tk, D)``. None if all y are 0. By
    definition 0.0 where nothing is truncated: for softmax, for features that keep both signs (``pola``, ``nala``), and
    for those that squash negative parts without cutting them off (``elu``).

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q = torch.tensor([3.0, -4.0]).view(1, 1, 1, 2)
        >>> energy_lost(create_mechanism("relu", num_heads=1, head_dim=2), q, q)
        [0.64]
        >>> energy_lost(create_mechanism("nala", num_heads=1, head_dim=2), q, q)
        [0.0]
    """
    return energy_shares(*energy_sums(mechanism, q, k, rotate=rotate))


@torch.no_grad()
def energy_sums(mechanism: Mechanism, q: Tensor, k: Tensor, *, rotate: Rotate | None = None) -> tuple[Tensor, Tensor]:
    """Lost and total energy of each head, both ``(H,)`` in fp64, to be summed over several batches.

    If nothing is truncated the total is 1, so that no share is undefined.
    """
    vectors = mechanism.truncated(*_as_attended(mechanism, q, k, rotate))
    if vectors is None:
        return torch.zeros(q.shape[1], dtype=torch.float64), torch.ones(q.shape[1], dtype=torch.float64)
    sums = []
    for cut in (lambda y: F.relu(-y), lambda y: y):
        of_q, of_k = (cut(y.double()).square().sum((0, 2, 3)) for y in vectors)
        sums.append((of_q + of_k.repeat_interleave(of_q.shape[0] // of_k.shape[0])).cpu())
    return sums[0], sums[1]


def energy_shares(lost: Tensor, total: Tensor) -> list[float | None]:
    """``lost / total`` of each head, None where the total is 0."""
    return [part / whole if whole else None for part, whole in zip(lost.tolist(), total.tolist(), strict=True)]


def _as_attended(mechanism: Mechanism, q: Tensor, k: Tensor, rotate: Rotate | None) -> tuple[Tensor, Tensor]:
    """q and k as ``attend`` gets them: rotated if the mechanism rotates its inputs, not if it rotates features."""
    return rotate(q, k) if rotate is not None and mechanism.rotates == "inputs" else (q, k)


def opposed_kept(
    mechanism: Mechanism, q: Tensor, k: Tensor, *, x: Tensor | None = None, rotate: Rotate | None = None
) -> list[float | None]:
    """Share of sign-opposed interactions that the mechanism keeps, for each head.

    An interaction is a query t ``(B, H, Tq, D)``, a key s ``(B, H_kv, Tk, D)`` and a channel i with ``q_ti k_si < 0``.
    Each is weighted by ``|q_ti k_si|``, and the share of it that is kept is

    - 1 or 0: whether the unnormalised weight depends on both numbers together, in any flow, that is
      ``d^2 w_ts / dq_ti dk_si = sum_f (dphi_tf / dq_ti) (dpsi_sf / dk_si) != 0`` for ``w_ts = phi_t . psi_s``;
    - where a ReLU truncates vectors y (``mechanism.truncated``), the part of that sum which passes it,
      ``sum_f |a_f b_f| [y_tf > 0] [y_sf > 0] / sum_f |a_f b_f|`` with ``a = dy_t / dq_ti``, ``b = dy_s / dk_si``. There
      a yes or no would say nothing: a reflection across heads spreads every channel a little over all features.

    So relu, focused and cosformer keep 0; nala 0 with its hard angle, 1 with the others; pola (in its opposite flow),
    elu, the Taylor series and softmax 1; mirror a part, 1/16 with random vectors and angles. None without features of
    single tokens (``hydra``), and if no interaction is opposed. Derivatives are those of a token's own features, by
    autograd in fp64, on a sample of at most 2 images and 12 tokens; with truncation they are finite differences.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> [opposed_kept(create_mechanism(name, num_heads=2, head_dim=8), q, k) for name in ("relu", "pola", "nala")]
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    q, k = _as_attended(mechanism, q.detach().double(), k.detach().double(), rotate)
    mechanism = copy.deepcopy(mechanism).double()
    with torch.no_grad():
        if mechanism.truncated(q[:1], k[:1]) is not None:
            return _share_past_truncation(mechanism, q, k)
    # A few images and tokens, evenly spaced; the same ones of q, k and x where these are one sequence.
    q, k = (t[:IMAGES, :, _spaced(t.shape[2], TOKENS, t.device)] for t in (q, k))
    x = None if x is None else x.detach().double()[:IMAGES, _spaced(x.shape[1], TOKENS, x.device)]
    group = q.shape[1] // k.shape[1]
    weight = -(q.unsqueeze(3) * k.repeat_interleave(group, dim=1).unsqueeze(2)).clamp(max=0)  # (B, H, Tq, Tk, D)
    total = weight.sum((0, 2, 3, 4))
    if isinstance(mechanism, Softmax):
        return [None if whole == 0 else 1.0 for whole in total.tolist()]
    of_q, of_k = (_own_derivatives(mechanism, q, k, x, queries=side) for side in (True, False))
    if of_q is None or of_k is None:
        return [None] * q.shape[1]
    mixed = torch.einsum("bhjtif,bhjsif->bhjtsi", of_q, of_k)
    lengths = of_q.norm(dim=-1).unsqueeze(4) * of_k.norm(dim=-1).unsqueeze(3)
    kept = (mixed.abs() > ROUNDING * lengths).any(2) * weight
    return energy_shares(kept.sum((0, 2, 3, 4)), total)


def _own_derivatives(mechanism: Mechanism, q: Tensor, k: Tensor, x: Tensor | None, *, queries: bool) -> Tensor | None:
    """``d phi_tf / d q_ti`` or ``d psi_sf / d k_si``: ``(B, H, flows, T, D, F)``; None without features.

    Each token gets a copy of the batch in which it alone is a variable: the features of other tokens may depend on it
    too (means, softmaxes over tokens), and their derivatives must not be added to its own.
    """
    moving = q if queries else k
    B, H, T, _ = moving.shape
    q, k = (t.repeat_interleave(T, dim=0) for t in (q, k))
    x = None if x is None else x.repeat_interleave(T, dim=0)
    own, copies = torch.arange(T, device=moving.device).repeat(B), torch.arange(B * T, device=moving.device)
    with torch.enable_grad():
        leaf = moving.transpose(1, 2).flatten(0, 1).clone().requires_grad_()  # (B T, H or H_kv, D)
        varied = (q if queries else k).transpose(1, 2).index_put((copies, own), leaf).transpose(1, 2)
        found = pairwise_features(mechanism, varied if queries else q, k if queries else varied, x)
        if found is None:
            return None
        features = found[0 if queries else 1][copies, :, :, own]  # (B T, H, flows, F)
        features = features.unflatten(1, (H, -1)).permute(2, 3, 4, 0, 1)  # (queries of a key, flows, F, B T, H_in)
        columns: list[Tensor] = []
        for feature in features.flatten(0, 2):
            if not feature.requires_grad:
                return None
            columns += torch.autograd.grad(feature.sum(), leaf, retain_graph=True, materialize_grads=True)
    table = torch.stack(columns).unflatten(0, features.shape[:3])
    # (group, flows, F, B T, H_in, D) to (B, H, flows, T, D, F)
    return table.unflatten(3, (B, T)).permute(3, 5, 0, 1, 4, 6, 2).flatten(1, 2)


@torch.no_grad()
def _share_past_truncation(mechanism: Mechanism, q: Tensor, k: Tensor) -> list[float | None]:
    """The share of ``opposed_kept`` for a mechanism that truncates; q and k as ``truncated`` takes them, in fp64.

    The derivatives of y are finite differences. Channel i of one head is changed a little in all queries and keys
    together, so that a variance over tokens, which may rotate the vectors, stays the same. Channels take turns among
    the images, each in a copy of its own.
    """
    (B, H, _, D), H_kv = q.shape, k.shape[1]
    kept, total = q.new_zeros(H), q.new_zeros(H)
    for start in range(0, H * D, COPIES):
        number = torch.arange(start, min(start + COPIES, H * D), device=q.device)
        head, channel, pair, N = number // D, number % D, (q[number % B], k[number % B]), number - start
        step = STEP * max(*(float(x.abs().mean()) for x in pair), STEP)

        def own(vectors: Any, N: Tensor = N, heads: Any = (head, head * H_kv // H)) -> list[Tensor]:
            """Of each copy those of its own head, ``(N, T, F)``."""
            both = zip(vectors, heads, strict=True)
            return [y[N, h][:, _spaced(y.shape[2], PAIRED, y.device)] for y, h in both]

        ends = []
        for change in (step, -step, 0.0):
            moved = tuple(x.clone() for x in pair)
            for x, h in zip(moved, (head, head * H_kv // H), strict=True):
                x[N, h, :, channel] += change
            ends.append(own(mechanism.truncated(*moved)))
        moves, alive = [(up - down).abs() for up, down in zip(*ends[:2], strict=True)], [y > 0 for y in ends[2]]
        sides = [x[N, :, channel] for x in own(pair)]
        weight = -(sides[0].unsqueeze(2) * sides[1].unsqueeze(1)).clamp(max=0)  # (N, Tq, Tk)
        through, potential = (moves[0] * alive[0]) @ (moves[1] * alive[1]).mT, moves[0] @ moves[1].mT
        share = through / torch.where(potential > 0, potential, 1)
        kept.index_add_(0, head, (share * weight).sum((1, 2)))
        total.index_add_(0, head, weight.sum((1, 2)))
    return energy_shares(kept, total)


def _spaced(length: int, most: int, device: torch.device) -> Tensor:
    """At most so many places, evenly spaced."""
    return torch.linspace(0, length - 1, min(length, most), dtype=torch.float64).round().long().to(device)


def pairwise_features(mechanism: Mechanism, q: Tensor, k: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Features phi and psi whose products ``phi_t . psi_s`` are the unnormalised weights, per head and flow.

    They are what the mechanism passes to ``linear_attention``, before any rotation there: ``phi (B, H, flows, Tq, F)``
    of q ``(B, H, Tq, D)``, and ``psi (B, H, flows, Tk, F)`` of the keys that a head reads. The result is None for
    mechanisms that do not end in that call. In ``hydra`` heads are channels, and these features are a constant.
    """
    if not isinstance(mechanism, LinearBase):
        return None

    def take(call: Call, arguments: dict[str, Any]) -> MechanismOutput:
        raise _TakenError(arguments)

    listening = copy.copy(mechanism)  # shares the parameters; only its call of the algebra is replaced
    listening.linear = take  # type: ignore[method-assign]
    try:
        listening.attend(q, k, k, Call(mechanism.impl, x=x))
        return None
    except _TakenError as taken:
        (given,) = taken.args
    phi, psi = map_features(given["q"], given["k"], given.get("feature_map"))
    H, H_kv = q.shape[1], k.shape[1]
    if phi.shape[2] != q.shape[2] or psi.shape[2] != k.shape[2] or phi.shape[1] % H or phi.shape[1] % psi.shape[1]:
        return None
    flows = phi.shape[1] // H
    psi = psi.repeat_interleave(phi.shape[1] // psi.shape[1], dim=1)
    # Virtual heads are ordered by key head, then flow, then the query heads that share both.
    phi, psi = (t.unflatten(1, (H_kv, flows, H // H_kv)).transpose(2, 3).flatten(1, 2) for t in (phi, psi))
    return phi, psi


class _TakenError(Exception):
    """Raised where the mechanism calls the algebra, as the rest of it is not needed."""
