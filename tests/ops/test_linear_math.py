"""The algebra against formulas written out by hand: masks, decays, index conventions, normalisers, features."""

import math

import pytest
import torch
from torch import Tensor

from linattn import linear_attention, linear_attention_step, linear_attention_with_state
from linattn.ops.maps import SplitPower

FORMS = ("reference", "recurrent", "chunked")
EXACT = 1e-12  # fp64 sums over a few hundred terms of size one


def inputs(B: int = 2, H: int = 2, T: int = 9, K: int = 4, V: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(B, H, T, D, generator=make, dtype=torch.float64) for D in (K, K, V))  # type: ignore


def products(decays: list[float], T: int, index: str, causal: bool) -> Tensor:
    """M by its definition: the product of the decays between two tokens, with the query's or the key's own."""
    M = torch.zeros(T, T, dtype=torch.float64)
    for i in range(T):
        for j in range(T):
            if causal and j > i:
                continue
            low, high = min(i, j), max(i, j)
            query_is_later = j <= i
            takes_in_the_later = (index == "query") == query_is_later
            own = range(low + 1, high + 1) if takes_in_the_later else range(low, high)
            M[i, j] = torch.tensor([decays[r] for r in own], dtype=torch.float64).prod()
    return M


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("index", ["key", "query"])
@pytest.mark.parametrize("causal", [True, False])
def test_decay_is_the_product_between_two_tokens(impl: str, index: str, causal: bool) -> None:
    q, k, v = inputs(B=1, H=1)
    decays = [0.9, 0.2, 0.7, 1.0, 0.05, 0.6, 0.99, 0.3, 0.8]
    M = products(decays, len(decays), index, causal)
    scores = (q @ k.mT) * M
    expected = scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)
    a = torch.tensor(decays, dtype=torch.float64).log().view(1, 1, -1)
    found = linear_attention(q, k, v, causal=causal, log_decay=a, decay_index=index, impl=impl)
    assert (found - expected).abs().max() < EXACT


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_weight_of_a_key_is_a_factor_of_its_features(impl: str, causal: bool) -> None:
    q, k, v = inputs()
    i = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, weights = -torch.rand(2, 2, 9, dtype=torch.float64), i.exp().unsqueeze(-1)
    options = {"causal": causal, "log_decay": a, "impl": impl}
    found = linear_attention(q, k, v, log_input=i, norm_features=(q, 1 + k), **options)
    want = linear_attention(q, k * weights, v, norm_features=(q, (1 + k) * weights), **options)
    assert (found - want).abs().max() < EXACT
    if causal:
        state = None
        for t in range(9):
            now = (x[:, :, t] for x in (q, k, v))
            output, state = linear_attention_step(*now, state, log_decay=a[..., t], log_input=i[..., t])
        want = linear_attention(q, k * weights, v, **options)
        assert (output - want[:, :, -1]).abs().max() < EXACT


@pytest.mark.parametrize("impl", FORMS)
def test_a_weight_of_two_is_a_key_that_comes_twice(impl: str) -> None:
    """Of each flow of a map, and of a masked token nothing, whatever its weight."""
    q, k, v = inputs(V=4)
    i, mask = torch.zeros(2, 2, 9, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    i[:, :, 2:5], i[:, :, 8], mask[:, 8] = math.log(2), torch.nan, False
    power = torch.full((2, 4), 1.5, dtype=torch.float64)
    maps = SplitPower(power, torch.ones_like(power), opposite=True)
    q, k = q - 0.5, k - 0.5
    found = linear_attention(q, k, v, feature_map=maps, log_input=i, key_mask=mask, impl=impl)
    k, v = (torch.cat([x[:, :, :8], x[:, :, 2:5]], dim=2) for x in (k, v))
    assert (found - linear_attention(q, k, v, feature_map=maps, impl=impl)).abs().max() < EXACT


@pytest.mark.parametrize("impl", FORMS)
def test_default_index_is_query_when_causal_and_key_when_bidirectional(impl: str) -> None:
    q, k, v = inputs()
    a = -torch.rand(2, 2, 9, dtype=torch.float64)
    for causal, index in ((True, "query"), (False, "key")):
        plain = linear_attention(q, k, v, causal=causal, log_decay=a, impl=impl)
        named = linear_attention(q, k, v, causal=causal, log_decay=a, decay_index=index, impl=impl)
        assert torch.equal(plain, named)


@pytest.mark.parametrize("impl", FORMS)
def test_one_decay_per_channel_acts_channel_by_channel(impl: str) -> None:
    q, k, v = inputs(B=1, H=1, K=2)
    a = -torch.rand(1, 1, 9, 2, dtype=torch.float64)
    scores = sum(
        (q[..., d : d + 1] @ k[..., d : d + 1].mT) * products(a[0, 0, :, d].exp().tolist(), 9, "query", True)
        for d in range(2)
    )
    found = linear_attention(q, k, v, causal=True, log_decay=a, normalizer=None, impl=impl)
    assert (found - scores @ v).abs().max() < EXACT


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("shape", [(2, 2, 9), (2, 2, 9, 4)])
def test_a_decay_of_zero_forgets_everything(impl: str, shape: tuple[int, ...]) -> None:
    q, k, v = inputs()
    a = torch.full(shape, -0.1, dtype=torch.float64)
    a[:, :, 5] = -torch.inf
    a.requires_grad_()
    whole = linear_attention(q, k, v, causal=True, log_decay=a, impl=impl)
    tail = linear_attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], causal=True, log_decay=a[:, :, 5:], impl=impl)
    assert (whole[:, :, 5:] - tail).abs().max() < EXACT
    (gradient,) = torch.autograd.grad(whole.sum(), a)
    assert gradient.isfinite().all()
    assert (gradient[:, :, 5] == 0).all()


@pytest.mark.parametrize("impl", FORMS)
def test_normalizers(impl: str) -> None:
    q, k, v = inputs()
    q = q - 0.5  # signed row sums
    scores = (q @ k.mT).tril()
    rows = scores.sum(-1, keepdim=True)
    cases = {None: torch.ones_like(rows), "sum": rows + 0.25, "abs_max_one": rows.abs().clamp(min=1)}
    for normalizer, n in cases.items():
        found = linear_attention(q, k, v, causal=True, normalizer=normalizer, eps=0.25, impl=impl)
        assert (found - scores @ v / n).abs().max() < EXACT / n.abs().min()


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_denominator_with_its_own_features(impl: str, causal: bool) -> None:
    q, k, v = inputs()
    norm_q, norm_k = (torch.rand(2, 2, 9, 6, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(9, 9, dtype=torch.float64)
    mask = mask.tril() if causal else mask
    expected = ((q @ k.mT) * mask) @ v / (((norm_q @ norm_k.mT) * mask).sum(-1, keepdim=True) + 1e-6)
    found = linear_attention(q, k, v, causal=causal, norm_features=(norm_q, norm_k), impl=impl)
    assert (found - expected).abs().max() < EXACT


@pytest.mark.parametrize("impl", FORMS)
def test_cross_attention_takes_any_number_of_queries(impl: str) -> None:
    q, k, v = inputs()
    q = torch.rand(2, 2, 5, 4, dtype=torch.float64)
    scores = q @ k.mT
    found = linear_attention(q, k, v, impl=impl)
    assert (found - scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)).abs().max() < EXACT


@pytest.mark.parametrize("impl", FORMS)
def test_bidirectional_state_collects_keys_in_pieces(impl: str) -> None:
    q, k, v = inputs()
    first = linear_attention_with_state(q, k[:, :, :4], v[:, :, :4], impl=impl)
    both = linear_attention_with_state(q, k[:, :, 4:], v[:, :, 4:], initial_state=first.state, impl=impl)
    assert (both.output - linear_attention(q, k, v, impl=impl)).abs().max() < EXACT
