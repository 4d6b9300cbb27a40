"""The specification: hybrid attention as two full matrices of weights, O(T^2).

    exact(t, i)  = i <= t and (i in the window of t, or i chosen and t before the end of i's time)
    m_t          = max of s_ti = q_t . k_i over exact (t, i)
    exact_t      = sum over exact (t, i) of e^{s_ti - m_t} v_i
    linear_t     = sum over the other i <= t of (phi_t . psi_i) v_i

and the totals likewise with 1 in place of v. Each visible token is in one of the two sums, never in both.
"""

import torch
from torch import Tensor

from linattn.ops.hybrid.types import HybridSums, Rows
from linattn.ops.shared.call import finite_unit


def hybrid_sums(rows: Rows) -> HybridSums:
    """All queries of the rows against all tokens: those of the rows and those that a state chose before."""
    H_kv, S = rows.k.shape[1], rows.k.shape[2]
    position = rows.position[:, None].expand(-1, H_kv, -1)  # (B, H_kv, S)
    k, v, features, key_position = rows.k, rows.v, rows.key_features, position
    real, until = rows.real[:, None].expand(-1, H_kv, -1), torch.zeros_like(position)
    chosen = rows.salient
    if chosen is not None:
        old = slice(0, chosen.head)
        k, v = torch.cat([chosen.k[:, :, old], k], 2), torch.cat([chosen.v[:, :, old], v], 2)
        features = torch.cat([chosen.features[:, :, old], features], 2)
        key_position = torch.cat([chosen.position[:, :, old], key_position], 2)
        real = torch.cat([chosen.until[:, :, old] > 0, real], 2)
        until = torch.cat([chosen.until[:, :, old], chosen.until_of_rows(S)], 2)
    t, i = position.unsqueeze(-1), key_position.unsqueeze(-2)
    visible = (i <= t) & real.unsqueeze(-2)  # (B, H_kv, T, S)
    exact = visible & (rows.window.covers(t, i) | (t < until.unsqueeze(-2)))
    q, phi = (x.unflatten(1, (H_kv, -1)) for x in (rows.q, rows.query_features))  # (B, H_kv, G, T, .)
    logits = torch.einsum("bhgtk,bhsk->bhgts", q, k).masked_fill(~exact.unsqueeze(2), -torch.inf)
    log_max = logits.amax(-1)
    weights = (logits - finite_unit(log_max).unsqueeze(-1)).exp()
    others = torch.einsum("bhgtf,bhsf->bhgts", phi, features) * (visible & ~exact).unsqueeze(2)

    def weigh(weights: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("bhgts,bhsv->bhgtv", weights, v).flatten(1, 2), weights.sum(-1).flatten(1, 2)

    linear, linear_total = weigh(others)
    linear = linear + torch.einsum("bhgtf,bhfv->bhgtv", phi, rows.initial.kv).flatten(1, 2)
    linear_total = linear_total + torch.einsum("bhgtf,bhf->bhgt", phi, rows.initial.k).flatten(1, 2)
    return HybridSums(*weigh(weights), log_max.flatten(1, 2), linear, linear_total)
