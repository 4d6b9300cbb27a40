"""InLine and MALA: weights around 1/N, written as matrices."""

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted

NAMES = ("inline", "mala")


def build(name: str, **options):
    return create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, **options)


def weights(name: str, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Rows over the visible keys alone; the mean of each row is taken over these."""
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    count = visible.sum(-1, keepdim=True)
    if name == "mala":
        q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    z = scores(q, k) / 6**0.5
    mean = torch.where(visible, z, 0).sum(-1, keepdim=True) / count
    w = (1 + 1 / (mean + 1e-6)) * z - mean if name == "mala" else z - mean + 1
    return torch.where(visible, w / count, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_formula(name, impl, causal):
    q, k, v = draw()
    expected = weighted(weights(name, q, k, causal), v, causal, normalized=False)
    torch.testing.assert_close(build(name, causal=causal, impl=impl)(q, k, v), expected, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_queries_of_another_sequence(name):
    q, k, v = draw()
    k, v = k[:, :, :7], v[:, :, :7]
    expected = weighted(weights(name, q, k, causal=False), v, causal=False, normalized=False)
    torch.testing.assert_close(build(name)(q, k, v), expected, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_common_part_of_all_keys_costs_no_digits_in_bf16(name, causal):
    """Scores of 30 that nearly cancel: rounded to 8 bits each they would be wrong by 0.1."""
    q, k, v = draw()
    q, k, v = (x.bfloat16() for x in (q, k + 20, v))
    mechanism = build(name, causal=causal)
    exact = mechanism(q.double(), k.double(), v.double())
    found = mechanism(q, k, v)
    assert found.dtype == torch.bfloat16
    # one rounding of the output, and fp32 sums of terms a few hundred times as large
    assert (found.double() - exact).abs().max() <= (2**-9 + 1e-3) * exact.abs().max()
