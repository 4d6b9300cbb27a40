import math

import pytest
import torch

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted


def build(**options):
    return create_mechanism("cosformer", num_heads=4, num_kv_heads=2, head_dim=6, **{"max_length": 16} | options)


@pytest.mark.parametrize(("causal", "keys"), [(True, 11), (False, 11), (False, 7)])
@pytest.mark.parametrize("impl", FORMS)
def test_formula(impl, causal, keys):
    q, k, v = draw()
    k, v = k[:, :, :keys], v[:, :, :keys]
    t, s = torch.arange(11, dtype=torch.float64), torch.arange(keys, dtype=torch.float64)
    cosine = torch.cos(math.pi / 2 * (t[:, None] - s[None, :]) / 16)
    expected = weighted(scores(q.relu(), k.relu()) * cosine, v, causal)
    torch.testing.assert_close(build(causal=causal, impl=impl)(q, k, v), expected, **TOLERANCE)


def test_past_max_length():
    q, k, v = draw()
    with pytest.raises(ValueError, match="11 tokens is past max_length = 10"):
        build(max_length=10)(q, k, v)
    with pytest.raises(ValueError, match="11 tokens is past max_length = 10"):
        build(max_length=10)(q, k[:, :, :2], v[:, :, :2])
    mechanism = build(max_length=11, causal=True)
    _, state = mechanism.with_state(q, k, v)
    with pytest.raises(ValueError, match="12 tokens is past max_length = 11"):
        mechanism.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)


def test_only_real_tokens_count_against_max_length():
    q, k, v = draw()
    mechanism = build(max_length=6)
    mask = torch.arange(11).expand(2, -1) < 6
    assert mechanism(q, k, v, key_mask=mask).isfinite().all()
    assert mechanism(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 6, 11])).isfinite().all()
    with pytest.raises(ValueError, match="7 tokens is past"):
        mechanism(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 4, 11]))


def published(q, k, v, length):
    """One sequence, both ways, with the cosine of its own ``length``."""
    t, s = (torch.arange(x.shape[2], dtype=torch.float64) for x in (q, k))
    cosine = torch.cos(math.pi / 2 * (t[:, None] - s[None, :]) / length)
    return weighted(scores(q.relu(), k.relu()) * cosine, v, causal=False)


@pytest.mark.parametrize("impl", FORMS)
def test_a_bidirectional_sequence_has_its_own_length(impl):
    q, k, v = draw()
    found = build(max_length=None, impl=impl)(q, k, v)
    torch.testing.assert_close(found, published(q, k, v, 11), **TOLERANCE)


def test_own_length_of_packed_sequences_with_padding():
    """Some of the second sequence and all of the first are padding."""
    q, k, v = (x[:1] for x in draw())
    q.requires_grad_()
    mask = torch.tensor([[False] * 3 + [True] * 4 + [False] + [True] * 3])
    found = build(max_length=None)(q, k, v, cu_seqlens=torch.tensor([0, 3, 11]), key_mask=mask)
    torch.testing.assert_close(found[:, :, mask[0]], published(*(x[:, :, mask[0]] for x in (q, k, v)), 7), **TOLERANCE)
    found.sum().backward()
    assert found.isfinite().all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [(11, 7), (5, 11)])
def test_own_length_of_two_sequences_is_that_of_the_longer_one(queries, keys):
    q, k, v = draw()
    q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
    mechanism = build(max_length=None)
    torch.testing.assert_close(mechanism(q, k, v), published(q, k, v, 11), **TOLERANCE)
    mask = torch.arange(keys).expand(2, -1) < 6
    real = k[:, :, :6], v[:, :, :6]
    torch.testing.assert_close(mechanism(q, k, v, key_mask=mask), published(q, *real, max(queries, 6)), **TOLERANCE)


@pytest.mark.parametrize("max_length", [None, 16])
@pytest.mark.parametrize("queries", [1, 5])  # one query would be spread over all positions of the keys
def test_queries_of_another_sequence_are_refused_beside_packed_keys(max_length, queries):
    q, k, v = (x[:1] for x in draw())
    with pytest.raises(ValueError, match=f"cu_seqlens needs as many queries as keys, got Tq = {queries} and Tk = 11"):
        build(max_length=max_length)(q[:, :, :queries], k, v, cu_seqlens=torch.tensor([0, 3, 11]))
