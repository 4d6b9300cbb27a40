import pytest
import torch

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted


def build(**options):
    return create_mechanism("retention", num_heads=4, num_kv_heads=2, head_dim=6, **options)


def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 64], dtype=torch.float64)  # two heads share
    t = torch.arange(q.shape[2])
    return gamma[:, None, None] ** (t[:, None] - t[None, :]).abs() * scores(q, k) / 6**0.5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
def test_formula(impl, causal):
    q, k, v = draw()
    expected = weighted(weights(q, k), v, causal, normalized=False)
    torch.testing.assert_close(build(causal=causal, impl=impl)(q, k, v), expected, **TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
def test_normalized_by_the_row_sum_or_one(causal):
    q, k, v = draw()
    w = weights(q, k)
    rows = (w.tril() if causal else w).sum(-1, keepdim=True).abs()
    assert (rows < 1).any()
    assert (rows > 1).any()
    expected = weighted(w, v, causal, normalized=False) / rows.clamp(min=1)
    found = build(causal=causal, normalizer="abs_max_one")(q, k, v)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decay_values(dtype):
    mechanism = create_mechanism("retention", num_heads=24, head_dim=2)
    expected = torch.log1p(-(2.0 ** -torch.arange(5, 29, dtype=torch.float64)))
    found = mechanism.log_decay(torch.zeros(1, dtype=dtype))
    # gates are fp32 even for half-precision inputs, and the weakest decay, 2^-28, must not round to none
    precision = 1e-14 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=precision, atol=0)
