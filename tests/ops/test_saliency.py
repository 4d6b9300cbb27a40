"""Which tokens are kept exact: scores and choices against plain loops."""

import math

import pytest
import torch

from linattn.ops.hybrid import rows
from linattn.ops.hybrid.saliency import self_saliency
from linattn.ops.hybrid.types import FOREVER, SalientBudget, SalientList
from ops.hybrid_cases import F64, make, published_divergence, self_probability

W = 6


def scores_of(q, k, window=W, **options):
    return self_saliency(q * q.shape[3] ** -0.5, k, torch.ones(q.shape[0], q.shape[2]).bool(), window, **options)


def test_scores_are_the_definition():
    inputs = make(20)
    q, k = inputs["q"], inputs["k"]
    found = scores_of(q, k)
    largest = scores_of(q, k, reduce="max")
    divergence = scores_of(q[:, ::2], k, kind="kl")
    for b in range(2):
        for g in range(2):
            group = q[b, 2 * g : 2 * g + 2]
            for t in range(20):
                heads = [self_probability(x[None], k[b, g], t, W) for x in group]
                assert abs(found[b, g, t] - sum(heads) / 2) < 1e-12
                assert abs(largest[b, g, t] - max(heads)) < 1e-12
                assert abs(divergence[b, g, t] - published_divergence(group[0], k[b, g], t, W)) < 1e-10
    assert (found[:, :, 0] == 0).all()  # alone in its window: log 1, not NaN


@pytest.mark.parametrize("kind", ["log_prob", "kl"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("window", [1, W])
def test_no_tokens_and_one_token(window, reduce, kind):
    q, k = torch.ones(2, 4, 1, 5, dtype=F64), torch.ones(2, 2, 1, 5, dtype=F64)
    alone = {"log_prob": 0.0, "kl": math.log((1 + 1e-8) / 1e-8)}[kind]
    found = scores_of(q, k, window, kind=kind, reduce=reduce)
    torch.testing.assert_close(found, torch.full((2, 2, 1), alone, dtype=F64))
    for no_q, no_k in ((q[:, :, :0], k[:, :, :0]), (q[:0], k[:0])):
        assert scores_of(no_q, no_k, window, kind=kind, reduce=reduce).shape == no_k.shape[:3]


@pytest.mark.parametrize("pairs", [7, 2**24])
def test_under_a_cap_the_best_so_far_stay(pairs, monkeypatch):
    """Ties, sinks, tokens of a state and chunks that are not complete, against a list that is sorted at each border."""
    monkeypatch.setattr(rows, "MOST_PAIRS", pairs)
    made = torch.Generator().manual_seed(0)
    head, per_chunk, borders, cap, sinks = 2, 3, torch.tensor([[4, 8, 12, 16, 20]]), 4, 1
    N = head + per_chunk * borders.shape[1]
    scores = torch.randint(-2, 3, (1, 2, N), generator=made).double()
    position = torch.arange(N).expand(1, 2, N)
    until = torch.where(torch.rand(1, 2, N, generator=made) < 0.8, FOREVER, 0)
    expected = until.clone()
    for h in range(2):
        kept = [i for i in range(head) if until[0, h, i]]
        for c, border in enumerate(borders[0].tolist()):
            first = head + c * per_chunk
            kept += [i for i in range(first, first + per_chunk) if until[0, h, i]]
            kept.sort(key=lambda i, h=h: (i >= sinks, -scores[0, h, i].item(), i))
            expected[0, h, kept[cap:]] = border
            kept = kept[:cap]
    given = SalientList(*[scores] * 4, position, until, position, head, per_chunk, cap)
    found = rows._with_cap(given, borders, SalientBudget(1.0, 4, cap=cap, sinks=sinks)).until
    assert (expected < FOREVER).sum() > 2 * cap
    assert torch.equal(found, expected)
