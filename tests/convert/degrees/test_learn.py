"""Learning features from queries and keys: the losses by hand, and that they fall."""

import math

import pytest
import torch

from linattn.convert.degrees.kernel import PositiveFeatures, log_features, normal_features, scaled
from linattn.convert.degrees.learn import (
    FeatureLearner,
    LearnOptions,
    attention_row_loss,
    kernel_loss,
    learn_features,
    select_pairs,
)
from linattn.support.options import OptionError

B, H, H_KV, T, D, M = 2, 4, 2, 9, 6, 12


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, heads, T, D, generator=generator) for heads in (H, H_KV))
    return q, k, normal_features(H_KV, M, D, generator)


def by_hand(q, k, features, loss, causal, real):
    """Row by row, in fp64, straight from the formulas."""
    found = []
    for b in range(B):
        for h in range(H):
            own = h // (H // H_KV)
            mine = PositiveFeatures(*(part[own : own + 1] for part in features))
            phi_q, phi_k = (log_features(scaled(x[None].double()), mine).exp()[0] for x in (q[b, h], k[b, own]))
            exact = (q[b, h].double() @ k[b, own].double().T / math.sqrt(D)).exp()
            for t in range(T):
                if not real[b, t]:
                    continue
                seen = [s for s in range(T) if real[b, s] and (s <= t or not causal)]
                K, estimate = exact[t, seen], (phi_k @ phi_q[t])[seen]
                if loss == "l2":
                    found.append((own, (K - estimate).square().sum()))
                else:
                    p, e = K / K.sum(), estimate / estimate.sum()
                    found.append((own, (p * (p / e).log()).sum()))
    return found


@pytest.mark.parametrize(("causal", "padded"), [(True, False), (False, False), (True, True)])
def test_the_row_loss_is_the_divergence_of_attention_rows(inputs, causal, padded):
    q, k, features = inputs
    real = torch.ones(B, T, dtype=torch.bool)
    if padded:
        real[1, :4] = False  # on the left, as batches of text are padded
        q, k = q.clone(), k.clone()
        q[1, :, :4], k[1, :, :4] = math.nan, math.nan
    pairs = select_pairs(q, k, real if padded else None, causal=causal)
    rows = [value for _, value in by_hand(q, k, features, "softmax", causal, real)]
    expected = torch.stack(rows).mean()
    torch.testing.assert_close(attention_row_loss(pairs, features).double(), expected, rtol=1e-4, atol=1e-6)


def test_the_kernel_loss_is_the_squared_error_in_units_of_the_largest_kernel_value(inputs):
    q, k, features = inputs
    pairs = select_pairs(q, k, causal=True)
    scores = (q.unflatten(1, (H_KV, -1)) @ k.unsqueeze(2).mT / math.sqrt(D)).double()
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    unit = scores.masked_fill(~visible, -math.inf).amax((0, 2, 3, 4)).exp()
    rows = by_hand(q, k, features, "l2", True, torch.ones(B, T, dtype=torch.bool))
    expected = torch.stack([value / unit[own] ** 2 for own, value in rows]).mean()
    torch.testing.assert_close(kernel_loss(pairs, features).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "l2"])
def test_gradients_are_those_of_finite_differences(inputs, loss):
    q, k, features = inputs
    pairs = select_pairs(q, k, causal=True)
    pairs = pairs._replace(q=pairs.q.double(), k=pairs.k.double())
    function = attention_row_loss if loss == "softmax" else kernel_loss
    assert torch.autograd.gradcheck(
        lambda z, log_alpha: function(pairs, PositiveFeatures(z, log_alpha)),
        (features.z.requires_grad_(), features.log_alpha.requires_grad_()),
    )


@pytest.mark.parametrize("loss", ["softmax", "l2"])
def test_learning_makes_the_loss_fall_on_what_was_not_seen(loss):
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(2, 2, 2, 24, 8, generator=generator).unbind()) for _ in range(5)]
    held_out = batches.pop()
    start = normal_features(2, 16, 8, generator)
    options = LearnOptions(steps=60, loss=loss, rows=12)
    learned, curve = learn_features(start, batches, options)
    assert len(curve) == 60
    pairs = select_pairs(*held_out, causal=True)
    function = attention_row_loss if loss == "softmax" else kernel_loss
    assert function(pairs, learned) < 0.7 * function(pairs, start)


def test_huge_norms_give_finite_losses_and_gradients():
    q, k = 30 * torch.randn(2, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    for loss in ("softmax", "l2"):
        learner = FeatureLearner(normal_features(2, 8, 16), LearnOptions(steps=2, loss=loss))
        assert math.isfinite(learner.step(q, k))
        assert all(part.isfinite().all() for part in learner.features())


def test_a_seed_fixes_which_rows_are_drawn(inputs):
    q, k, features = inputs
    curves = [learn_features(features, [(q, k)], LearnOptions(steps=3, rows=4, seed=s))[1] for s in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]


def test_wrong_options_and_empty_batches_are_refused(inputs):
    with pytest.raises(OptionError, match="softmax, l2"):
        LearnOptions(loss="mse")
    with pytest.raises(OptionError, match="steps"):
        LearnOptions(steps=0)
    with pytest.raises(ValueError, match="at least one pair"):
        learn_features(inputs[2], [], LearnOptions())
