"""Energy of queries and keys that a ReLU cuts off: what truncation costs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.analysis.attention_map import checked_rotation
from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.rotation import Rotate


def energy_lost(mechanism: Mechanism, q: Tensor, k: Tensor, *, rotate: Rotate | None = None) -> list[float | None]:
    """Share of the energy of queries and keys that the mechanism cuts off, for each head.

    ``sum relu(-y)^2 / sum y^2`` over the vectors y that ``mechanism.truncated(q, k)`` returns: those of a head's
    queries and of the keys it reads. By definition this is 0.0 where nothing is truncated: for softmax, for features
    that keep both signs (``pola``, ``nala``), and for those that squash negative parts without cutting them off
    (``elu``). It is None if all y are 0.

    q is ``(B, H, Tq, D)``, k is ``(B, H_kv, Tk, D)``.

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

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q = torch.tensor([3.0, -4.0]).view(1, 1, 1, 2)
        >>> energy_sums(create_mechanism("relu", num_heads=1, head_dim=2), q, q)
        (tensor([32.], dtype=torch.float64), tensor([50.], dtype=torch.float64))
    """
    vectors = mechanism.truncated(*checked_rotation(mechanism, q, k, rotate))
    if vectors is None:
        nothing = torch.zeros(q.shape[1], dtype=torch.float64)
        return nothing, torch.ones_like(nothing)
    sums = []
    for cut in (lambda y: F.relu(-y), lambda y: y):
        of_q, of_k = (cut(y.double()).square().sum((0, 2, 3)) for y in vectors)
        sums.append((of_q + of_k.repeat_interleave(of_q.shape[0] // of_k.shape[0])).cpu())
    return sums[0], sums[1]


def energy_shares(lost: Tensor, total: Tensor) -> list[float | None]:
    """``lost / total`` of each head, None where the total is 0.

    Example:
        >>> import torch
        >>> energy_shares(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
        [0.25, None]
    """
    pairs = zip(lost.tolist(), total.tolist(), strict=True)
    return [None if whole == 0 else part / whole for part, whole in pairs]
