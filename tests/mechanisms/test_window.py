"""Softmax over the last few tokens: what is in a window, what is not, and what is remembered of it."""

import pytest
import torch

from linattn import create_mechanism

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def inputs(batch=2, length=23, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, length, 8, generator=drawn, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, length, 8, generator=drawn, dtype=torch.float64).unbind()
    return q, k, v


def by_hand(q, k, v, window):
    """Token by token, each head with the keys of its group."""
    out = torch.empty_like(q)
    for t in range(q.shape[2]):
        seen = slice(max(0, t - window + 1), t + 1)
        for head in range(4):
            scores = torch.einsum("bd,bsd->bs", q[:, head, t], k[:, head // 2, seen]) / 8**0.5
            out[:, head, t] = torch.einsum("bs,bsd->bd", scores.softmax(-1), v[:, head // 2, seen])
    return out


def create(window=5, **options):
    return create_mechanism("window", num_heads=4, head_dim=8, num_kv_heads=2, causal=True, window=window, **options)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("window", [1, 5, 8, 23, 40])
def test_formula(impl, window):
    q, k, v = inputs()
    torch.testing.assert_close(create(window, impl=impl)(q, k, v), by_hand(q, k, v, window), **TOLERANCE)


def test_padding_takes_up_no_place_in_a_window():
    """Real tokens here and there, those of one row not those of the other; what padding holds does not matter."""
    q, k, v = inputs()
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.6
    dirty = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    found = create()(q, *dirty, key_mask=mask)
    for row, real in enumerate(mask):
        alone = by_hand(*(x[row : row + 1, :, real] for x in (q, k, v)), 5)
        torch.testing.assert_close(found[row : row + 1, :, real], alone, **TOLERANCE)


@pytest.mark.parametrize("cuts", [[3, 1, 12, 7], [1] * 23, [20, 3]])
def test_the_state_is_the_last_tokens(cuts):
    q, k, v = inputs()
    mechanism, state, found = create(), None, []
    for piece in zip(*(x.split(cuts, dim=2) for x in (q, k, v)), strict=True):
        output, state = mechanism.with_state(*piece, state=state)
        found.append(output)
    torch.testing.assert_close(torch.cat(found, dim=2), by_hand(q, k, v, 5), **TOLERANCE)
    assert torch.equal(state.keys, k[:, :, -4:])
    assert torch.equal(state.values, v[:, :, -4:])
    assert sum(part[0].numel() for part in state) == mechanism.state_size(23) == mechanism.state_size(10**6)


def test_a_state_of_another_window_is_refused():
    q, k, v = inputs()
    _, state = create(9).with_state(q, k, v)
    with pytest.raises(ValueError, match=r"state\.keys must have shape"):
        create(5).with_state(q, k, v, state=state)
