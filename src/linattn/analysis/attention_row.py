"""The attention weights of one query, at the cost of one backward pass."""

import torch
from torch import Tensor

from linattn.analysis.linear_part import linear_part
from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.rotation import Rotate


def attention_row(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    token: int,
    *,
    spatial_shape: tuple[int, int] | None = None,
    x: Tensor | None = None,
    rotate: Rotate | None = None,
) -> Tensor:
    """Compute the attention weights of the query at ``token``: ``(B, H, Tk)``, the mean over the channels of v.

    ``w_ts = sum_ij d o_ti / d v_sj / D``: since the output is linear in v, its gradient contains the weights of all
    keys at once, and memory grows only linearly with T. Query heads that share a key head take a backward pass each.

    Args:
        mechanism, q, k, spatial_shape, x, rotate: as in ``attention_map``, of which this is a row.
        token: from 0 to Tq - 1, or negative, counted from the end.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("softmax", num_heads=2, head_dim=8)
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> row = attention_row(mechanism, q, k, token=3)
        >>> row.shape, torch.allclose(row, (q[:, :, 3:4] @ k.mT / 8**0.5).softmax(-1)[:, :, 0])
        (torch.Size([1, 2, 5]), True)
    """
    if isinstance(token, bool) or not isinstance(token, int) or not -q.shape[2] <= token < q.shape[2]:
        raise ValueError(f"token must be an integer from {-q.shape[2]} to {q.shape[2] - 1}, got {token!r}")
    q, k, x = q.detach(), k.detach(), None if x is None else x.detach()
    group = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        v = torch.zeros_like(k).requires_grad_()
        out = linear_part(mechanism)(q, k, v, spatial_shape=spatial_shape, x=x, rotate=rotate)
        # The gradients of query heads that share values would add up, so each group passes one head at a time.
        heads = [out[:, h::group, token].mean(-1).sum() for h in range(group)]
        rows = [torch.autograd.grad(head, v, retain_graph=True)[0].sum(-1) for head in heads]  # (B, H_kv, Tk)
    return torch.stack(rows, dim=2).flatten(1, 2)
