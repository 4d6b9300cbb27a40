import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from linattn.mechanisms.hydra import HydraState
from mechanisms.formulas import FORMS, TOLERANCE, draw, per_query_head


def build(**options):
    return create_mechanism("hydra", **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 6} | options)


def joint_direction(x: Tensor) -> Tensor:
    wide = x.transpose(1, 2).flatten(2)
    return (wide / wide.norm(dim=-1, keepdim=True)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize(("causal", "keys"), [(True, 11), (False, 11), (False, 7)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("impl", FORMS)
def test_formula(impl, kv_heads, causal, keys):
    q, k, v = draw(kv_heads=kv_heads)
    k, v = k[:, :, :keys], v[:, :, :keys]
    terms = per_query_head(joint_direction(k) * v, 4)
    sums = terms.cumsum(2) if causal else terms.sum(2, keepdim=True)
    found = build(num_kv_heads=kv_heads, causal=causal, impl=impl)(q, k, v)
    torch.testing.assert_close(found, joint_direction(q) * sums, **TOLERANCE)


def test_state_of_another_shape():
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"state\.kv must have shape \(2, 2, 6\), got \(2, 4, 6\)"):
        build(causal=True).with_state(q, k, v, state=HydraState(torch.zeros(2, 4, 6, dtype=torch.float64)))
