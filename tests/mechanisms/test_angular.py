import math

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted


def build(**options):
    return create_mechanism("angular", num_heads=4, num_kv_heads=2, head_dim=6, **options)


def similarity(q: Tensor, k: Tensor) -> Tensor:
    return 0.5 + scores(q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)) / math.pi


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
def test_formula(impl, causal):
    q, k, v = draw()
    y = weighted(similarity(q, k), v, causal, normalized=False)
    expected = y / y.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(build(causal=causal, impl=impl)(q, k, v), expected, **TOLERANCE)
    mean = build(causal=causal, impl=impl, output_norm="sum")(q, k, v)
    torch.testing.assert_close(mean, weighted(similarity(q, k), v, causal), **TOLERANCE)


def test_many_equal_keys_in_half_precision():
    """The unnormalised sum of 5000 values of 40 is past fp16."""
    q, k = torch.randn(2, 1, 2, 5000, 8, dtype=torch.float16).unbind()
    v = torch.full_like(q, 40)
    out = create_mechanism("angular", num_heads=2, head_dim=8)(q, k, v)
    torch.testing.assert_close(out, torch.full_like(q, 8**-0.5), rtol=2e-3, atol=0)


def test_zero_vectors():
    """Without a direction every key counts one half; nothing to average gives nothing."""
    q, k, v = draw()
    mean = build(output_norm="sum")(torch.zeros_like(q), k, v)
    expected = v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(q)
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6)  # eps next to a sum of 5.5
    assert torch.equal(build()(q, k, torch.zeros_like(v)), torch.zeros_like(q))
