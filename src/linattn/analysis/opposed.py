"""How much of the interactions between channels of opposite sign reaches the attention weights."""

import copy
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.analysis.attention_map import checked_rotation
from linattn.analysis.energy import energy_shares
from linattn.mechanisms.base import Call, LinearBase, Mechanism, MechanismOutput
from linattn.mechanisms.softmax import Softmax
from linattn.ops.linear.call import map_features
from linattn.ops.shared.rotation import Rotate

IMAGES, TOKENS = 2, 12  # size of the sample on which features are differentiated
ROUNDING = 1e-12  # rounding of fp64 sums of products, relative to the product of their lengths


def opposed_kept(
    mechanism: Mechanism, q: Tensor, k: Tensor, *, x: Tensor | None = None, rotate: Rotate | None = None
) -> list[float | None]:
    """Share of sign-opposed interactions that the mechanism keeps, for each head.

    An interaction is a query t, a key s and a channel i with ``q_ti k_si < 0``. Each is weighted by ``|q_ti k_si|``,
    and the share of it that is kept is

    - 1 or 0: whether the unnormalised weight depends on both numbers together, in any flow, that is
      ``d^2 w_ts / dq_ti dk_si = sum_f (dphi_tf / dq_ti) (dpsi_sf / dk_si) != 0`` for ``w_ts = phi_t . psi_s``;
    - where a ReLU truncates vectors y (``mechanism.truncated``), the part of that sum which passes it,
      ``sum_f |a_f b_f| [y_tf > 0] [y_sf > 0] / sum_f |a_f b_f|`` with ``a = dy_t / dq_ti``, ``b = dy_s / dk_si``. There
      a yes or no would say nothing: a reflection across heads spreads every channel a little over all features.

    Accordingly relu, focused and cosformer keep 0; nala 0 with its hard angle, 1 with the others; pola, in its opposite
    flow, elu and the Taylor series 1; softmax 1, as the mixed derivative of its exponential does not vanish; mirror a
    part, 1/16 with random vectors and angles. The result is None without features of single tokens (``hydra``), and if
    no interaction is opposed. Derivatives are those of a token's own features, by autograd in fp64, on a sample of at
    most 2 images and 12 tokens; with truncation they are taken as in ``share_past_truncation``.

    Args:
        mechanism: any mechanism; q, k: ``(B, H, Tq, D)`` and ``(B, H_kv, Tk, D)``; x, rotate: as it was called with.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> [opposed_kept(create_mechanism(name, num_heads=2, head_dim=8), q, k) for name in ("relu", "pola", "nala")]
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    q, k = (t.detach().double() for t in (q, k))
    q, k = checked_rotation(mechanism, q, k, rotate)
    mechanism = copy.deepcopy(mechanism).double()
    with torch.no_grad():
        vectors = mechanism.truncated(q[:1], k[:1])
    if vectors is not None:
        return share_past_truncation(mechanism, q, k)
    q, k, x = _sample(q, k, None if x is None else x.detach().double())
    group = q.shape[1] // k.shape[1]
    weight = -(q.unsqueeze(3) * k.repeat_interleave(group, dim=1).unsqueeze(2)).clamp(max=0)  # (B, H, Tq, Tk, D)
    total = weight.sum((0, 2, 3, 4))
    if isinstance(mechanism, Softmax):
        return [None if whole == 0 else 1.0 for whole in total.tolist()]
    of_q = _own_derivatives(mechanism, q, k, x, queries=True)
    of_k = _own_derivatives(mechanism, q, k, x, queries=False)
    if of_q is None or of_k is None:
        return [None] * q.shape[1]
    mixed = torch.einsum("bhjtif,bhjsif->bhjtsi", of_q, of_k)
    lengths = of_q.norm(dim=-1).unsqueeze(4) * of_k.norm(dim=-1).unsqueeze(3)
    kept = (mixed.abs() > ROUNDING * lengths).any(2) * weight
    return energy_shares(kept.sum((0, 2, 3, 4)), total)


def _sample(q: Tensor, k: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """A few images and tokens, evenly spaced; the same ones of q, k and x where these are one sequence."""

    def spaced(t: Tensor, dim: int) -> Tensor:
        return t[:IMAGES].index_select(dim, _spaced(t.shape[dim], TOKENS).to(t.device))

    return spaced(q, 2), spaced(k, 2), None if x is None else spaced(x, 1)


def _own_derivatives(mechanism: Mechanism, q: Tensor, k: Tensor, x: Tensor | None, *, queries: bool) -> Tensor | None:
    """``d phi_tf / d q_ti`` or ``d psi_sf / d k_si``: ``(B, H, flows, T, D, F)``; None without features.

    Each token gets a copy of the batch in which it alone is a variable: the features of other tokens may depend on it
    too (means, softmaxes over tokens), and their derivatives must not be added to its own.
    """
    moving = q if queries else k
    B, H, T, _ = moving.shape
    x = None if x is None else x.repeat_interleave(T, dim=0)
    q, k = q.repeat_interleave(T, dim=0), k.repeat_interleave(T, dim=0)
    own = torch.arange(T, device=q.device).repeat(B)
    copy_index = torch.arange(B * T, device=q.device)
    with torch.enable_grad():
        leaf = moving.transpose(1, 2).flatten(0, 1).clone().requires_grad_()  # (B T, H or H_kv, D)
        varied = (q if queries else k).transpose(1, 2).index_put((copy_index, own), leaf).transpose(1, 2)
        found = pairwise_features(mechanism, varied if queries else q, k if queries else varied, x=x)
        if found is None:
            return None
        features = (found.phi if queries else found.psi)[copy_index, :, :, own]  # (B T, H, flows, F)
        group = features.shape[1] // H  # query heads that read one key head: each takes a pass
        columns = []
        for g in range(group):
            for flow in range(features.shape[2]):
                for f in range(features.shape[3]):
                    feature = features[:, g::group, flow, f].sum()
                    if not feature.requires_grad:
                        return None
                    (column,) = torch.autograd.grad(feature, leaf, retain_graph=True, allow_unused=True)
                    columns.append(torch.zeros_like(leaf) if column is None else column)
    table = torch.stack(columns).unflatten(0, (group, features.shape[2], features.shape[3]))
    # (group, flows, F, B T, H_in, D) to (B, H, flows, T, D, F)
    return table.unflatten(3, (B, T)).permute(3, 5, 0, 1, 4, 6, 2).flatten(1, 2)


STEP = 1e-4  # change of a channel, in units of the vectors' size: differences in fp64 then have about 8 digits
COPIES = 64  # channels that are changed in one call, each in a copy of an image
PAIRED = 64  # queries and keys that are paired up, evenly spaced


@torch.no_grad()
def share_past_truncation(mechanism: Mechanism, q: Tensor, k: Tensor) -> list[float | None]:
    """The share of ``opposed_kept`` for a mechanism that truncates; q and k as ``truncated`` takes them, in fp64.

    The derivatives of y are finite differences. Channel i of one head is changed a little in all queries and keys
    together, so that a variance over tokens, which may rotate the vectors, stays the same. Channels take turns among
    the images.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q = torch.tensor([[1.0, -1.0]]).double().view(1, 1, 1, 2)
        >>> share_past_truncation(create_mechanism("relu", num_heads=1, head_dim=2).double(), q, -q)
        [0.0]
    """
    (B, H, _, D), H_kv = q.shape, k.shape[1]
    kept, total = q.new_zeros(H), q.new_zeros(H)
    for start in range(0, H * D, COPIES):
        number = torch.arange(start, min(start + COPIES, H * D), device=q.device)
        head, channel, image = number // D, number % D, number % B
        part, whole = _shares(mechanism, q[image], k[image], head, head * H_kv // H, channel)
        kept.index_add_(0, head, part)
        total.index_add_(0, head, whole)
    return energy_shares(kept, total)


def _shares(
    mechanism: Mechanism, q: Tensor, k: Tensor, head: Tensor, key_head: Tensor, channel: Tensor
) -> tuple[Tensor, Tensor]:
    """Kept and total weight ``(N,)`` of each copy's opposed interactions in its own head and channel."""
    copies = torch.arange(len(head), device=q.device)
    step = STEP * max(float(q.abs().mean()), float(k.abs().mean()), STEP)
    ends = []
    for sign in (1, -1):
        moved = q.clone(), k.clone()
        moved[0][copies, head, :, channel] += sign * step
        moved[1][copies, key_head, :, channel] += sign * step
        ends.append(_truncated(mechanism, *moved))
    moves, alive, sides = [], [], []
    for i, (vectors, own) in enumerate(((q, head), (k, key_head))):
        chosen = _spaced(vectors.shape[2], PAIRED).to(q.device)
        moves.append((ends[0][i] - ends[1][i])[copies, own][:, chosen].abs())  # (N, T, F)
        alive.append(_truncated(mechanism, q, k)[i][copies, own][:, chosen] > 0)
        sides.append(vectors[copies, own, :, channel][:, chosen])
    weight = -(sides[0].unsqueeze(2) * sides[1].unsqueeze(1)).clamp(max=0)  # (N, Tq, Tk)
    through = (moves[0] * alive[0]) @ (moves[1] * alive[1]).mT
    potential = moves[0] @ moves[1].mT
    share = through / torch.where(potential > 0, potential, 1)
    return (share * weight).sum((1, 2)), weight.sum((1, 2))


def _truncated(mechanism: Mechanism, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    vectors = mechanism.truncated(q, k)
    assert vectors is not None
    return vectors


def _spaced(length: int, most: int) -> Tensor:
    """At most so many places, evenly spaced."""
    return torch.linspace(0, length - 1, min(length, most), dtype=torch.float64).round().long()


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
