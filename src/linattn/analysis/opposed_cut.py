"""The share of sign-opposed interactions that pass a truncation."""

import torch
from torch import Tensor

from linattn.mechanisms.base import Mechanism

STEP = 1e-4  # change of a channel, in units of the vectors' size: differences in fp64 then have about 8 digits
COPIES = 64  # channels that are changed in one call, each in a copy of an image
TOKENS = 64  # queries and keys that are paired up, evenly spaced


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
    shares = zip(kept.tolist(), total.tolist(), strict=True)
    return [None if whole == 0 else part / whole for part, whole in shares]


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
        chosen = _spaced(vectors.shape[2]).to(q.device)
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


def _spaced(length: int) -> Tensor:
    return torch.linspace(0, length - 1, min(length, TOKENS), dtype=torch.float64).round().long()
