"""Canon layers against their formula, and in every way they are called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linattn.layers.canon import Canon, check_canon

WIDTH, LENGTH = 6, 11
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # fp64 sums of four terms, in two orders
KINDS = {"canon": {}, "silu": {"residual": False, "activation": "silu"}}


def build(kind="canon", **options):
    torch.manual_seed(0)
    return Canon(WIDTH, **KINDS[kind], **options).double()


def draw(length=LENGTH, batch=2, seed=1):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def formula(canon, h):
    """``sum_w weight_w * h_{t-w}`` token by token; the last tap of a weight is the token's own."""
    W = canon.weight.shape[1]
    out = torch.zeros_like(h)
    for t in range(h.shape[1]):
        for w in range(min(W, t + 1)):
            out[:, t] += canon.weight[:, W - 1 - w] * h[:, t - w]
    return h + out if canon.residual else F.silu(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel_size", [1, 4, 5])
def test_formula(kind, kernel_size):
    canon, h = build(kind, kernel_size=kernel_size), draw()
    torch.testing.assert_close(canon(h), formula(canon, h), **TOLERANCE)


@pytest.mark.parametrize("kernel_size", [4, 9])
def test_starts_from_the_distribution_of_pytorchs_convolution(kernel_size):
    torch.manual_seed(0)
    weight = Canon(5000, kernel_size=kernel_size).weight
    bound = kernel_size**-0.5
    reference = nn.Conv1d(5000, 5000, kernel_size, groups=5000).weight
    assert bound * 0.99 < weight.abs().max() <= bound
    assert reference.abs().max() <= bound
    assert weight.mean().abs() < 0.01
    assert weight.std().item() == pytest.approx(reference.std().item(), rel=0.02)  # of some 20,000 numbers each


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[3, 8], [1, 1, 9], [10, 1], [1] * LENGTH])
def test_state_hand_over(kind, pieces):
    canon, h = build(kind), draw()
    state, found = None, []
    for piece in h.split(pieces, dim=1):
        out, state = canon.with_state(piece, state=state)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, dim=1), canon(h), **TOLERANCE)
    assert torch.equal(state.inputs, h[:, -3:])


@pytest.mark.parametrize("places", [[0, 1, 2], [2, 5, 6], [9, 10]])
def test_masked_tokens_are_not_there(places):
    canon, h = build(), draw()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, places] = False
    filled = h.clone()
    filled[0, places] = torch.nan
    found, state = canon.with_state(filled, key_mask=mask)
    torch.testing.assert_close(found[0][mask[0]], canon(h[:1, mask[0]])[0], **TOLERANCE)
    torch.testing.assert_close(found[1], canon(h)[1], **TOLERANCE)
    assert torch.equal(state.inputs[0], h[0, mask[0]][-3:])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("ABE", ValueError, "got 'E' in 'ABE'"),
        ("aBCD", ValueError, "got 'a' in 'aBCD'"),
        ("AA", ValueError, "each position once, got 'A'"),
        ("ABbC", ValueError, "B or b, not both"),
        (True, TypeError, "got bool"),
    ],
)
def test_bad_positions_are_named(text, error, message):
    with pytest.raises(error, match=message):
        check_canon(text)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 2.0}, ValueError, "width must be an integer >= 1"),
        ({"kernel_size": 0}, ValueError, "kernel_size must be an integer >= 1"),
        ({"activation": "relu"}, ValueError, "activation must be one of 'silu', None, got 'relu'"),
        ({"residual": 1}, TypeError, "residual must be True or False, got 1"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Canon(**{"width": WIDTH} | options)
