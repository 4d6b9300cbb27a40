"""The part of a mechanism that is linear in its values, for analyses that probe it."""

import copy

from torch import Tensor

from linattn.mechanisms.angular import Angular
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.zeros import Zeros
from linattn.ops.shared.rotation import Rotate


def linear_part(mechanism: Mechanism) -> Mechanism:
    """The mechanism without what it does to its output after the values are summed.

    Attention weights are the factors of the values: ``o_t = sum_s w_ts v_s``. The angular mechanism then scales its
    output to length 1, which is not a weighting, so here it is divided by its row sum instead. Zeros ends in a norm
    over the channels of a head, which is left out.

    Example:
        >>> from linattn import create_mechanism
        >>> linear_part(create_mechanism("angular", num_heads=2, head_dim=8)).output_norm
        'sum'
    """
    if isinstance(mechanism, Angular) and mechanism.output_norm != "sum":
        bare = copy.copy(mechanism)  # shares the parameters; only the option differs
        bare.output_norm = "sum"
        return bare
    if isinstance(mechanism, Zeros) and mechanism.head_norm:
        unscaled = copy.copy(mechanism)
        unscaled.head_norm = False
        return unscaled
    return mechanism


def checked_rotation(mechanism: Mechanism, q: Tensor, k: Tensor, rotate: Rotate | None) -> tuple[Tensor, Tensor]:
    """q and k as ``attend`` gets them: rotated if the mechanism rotates its inputs, unchanged if it rotates features.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q, k = torch.ones(2, 1, 2, 3, 8).unbind()
        >>> relu = create_mechanism("relu", num_heads=2, head_dim=8)
        >>> checked_rotation(relu, q, k, lambda q, k: (-q, -k))[0].min()
        tensor(1.)
    """
    return rotate(q, k) if rotate is not None and mechanism.rotates == "inputs" else (q, k)
