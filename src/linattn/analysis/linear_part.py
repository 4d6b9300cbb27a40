"""A mechanism as a linear map of its values, for what is read off by probing."""

import copy

from torch import Tensor

from linattn.mechanisms.angular import Angular
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.zeros import Zeros
from linattn.ops.rotation import Rotate


def linear_part(mechanism: Mechanism) -> Mechanism:
    """The mechanism without what it does to its output after the values are summed up.

    Attention weights are what the values are multiplied with: ``o_t = sum_s w_ts v_s``. The angular mechanism then
    gives its output the length 1, which is no weighting: its row sum takes the place of that length. Zeros ends in a
    norm over the channels of a head, which is left out.

    Example:
        >>> from linattn import create_mechanism
        >>> linear_part(create_mechanism("angular", num_heads=2, head_dim=8)).output_norm
        'sum'
    """
    if isinstance(mechanism, Angular) and mechanism.output_norm != "sum":
        bare = copy.copy(mechanism)  # shares the parameters; only the option is its own
        bare.output_norm = "sum"
        return bare
    if isinstance(mechanism, Zeros) and mechanism.head_norm:
        unscaled = copy.copy(mechanism)
        unscaled.head_norm = False
        return unscaled
    return mechanism


def checked_rotation(mechanism: Mechanism, q: Tensor, k: Tensor, rotate: Rotate | None) -> tuple[Tensor, Tensor]:
    """q and k as ``attend`` gets them: turned where the mechanism turns its inputs, as they are where its features.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q, k = torch.ones(2, 1, 2, 3, 8).unbind()
        >>> relu = create_mechanism("relu", num_heads=2, head_dim=8)
        >>> checked_rotation(relu, q, k, lambda q, k: (-q, -k))[0].min()
        tensor(1.)
    """
    return rotate(q, k) if rotate is not None and mechanism.rotates == "inputs" else (q, k)
