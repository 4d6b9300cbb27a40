import pytest
import torch
import torch.nn.functional as F

from linattn import create_mechanism
from mechanisms.formulas import TOLERANCE, draw, per_query_head


def build(**options):
    return create_mechanism("softmax", num_heads=4, num_kv_heads=2, head_dim=6, **options)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_is_scaled_dot_product_attention(impl, causal):
    q, k, v = draw()
    expected = F.scaled_dot_product_attention(q, per_query_head(k, 4), per_query_head(v, 4), is_causal=causal)
    torch.testing.assert_close(build(causal=causal, impl=impl)(q, k, v), expected, **TOLERANCE)


def test_scale():
    q, k, v = draw()
    torch.testing.assert_close(build(scale=0.5)(q, k, v), build()(q * 0.5 * 6**0.5, k, v), **TOLERANCE)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_that_sees_no_key_gives_zero(impl, causal):
    q, k, v = (x.requires_grad_() for x in draw())
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0] = False
    mask[1, :3] = False
    out = build(causal=causal, impl=impl)(q, k, v, key_mask=mask)
    assert not out[0].any()
    assert out[1, :, 3:].all()
    assert bool(out[1, :, :3].any()) is not causal
    out.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    assert not q.grad[0].any()
    assert not k.grad[0].any()


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_packed_prefill_then_steps(impl):
    lengths = (4, 0, 7)
    q, k, v = (x[:1] for x in draw())
    q1, k1, v1 = (x[:1].expand(3, -1, -1, -1) for x in draw(length=2, seed=1))
    mechanism = build(causal=True, impl=impl)
    out, state = mechanism.with_state(q, k, v, cu_seqlens=torch.tensor([0, 4, 4, 11]))
    assert state.keys.shape == (3, 2, 7, 6)
    assert state.mask.sum(1).tolist() == list(lengths)
    steps = []
    for t in range(2):
        step = mechanism.step(q1[:, :, t], k1[:, :, t], v1[:, :, t], state)
        state = step.state
        steps.append(step.output)
    begin = 0
    for row, length in enumerate(lengths):
        piece = slice(begin, begin + length)
        whole = [torch.cat([x[:, :, piece], y[row : row + 1]], dim=2) for x, y in ((q, q1), (k, k1), (v, v1))]
        expected = mechanism(*whole)
        torch.testing.assert_close(out[:, :, piece], expected[:, :, :length], **TOLERANCE)
        found = torch.stack([s[row] for s in steps], dim=1)
        torch.testing.assert_close(found, expected[0, :, length:], **TOLERANCE)
        begin += length


def test_packed_prefill_with_padding():
    q, k, v = (x[:1] for x in draw())
    mask = torch.ones(1, 11, dtype=torch.bool)
    mask[0, [1, 6]] = False
    mechanism, cu_seqlens = build(causal=True), torch.tensor([0, 4, 11])
    out, state = mechanism.with_state(q, k, v, key_mask=mask, cu_seqlens=cu_seqlens)
    assert state.mask.sum(1).tolist() == [3, 6]
    torch.testing.assert_close(out, mechanism(q, k, v, key_mask=mask, cu_seqlens=cu_seqlens), **TOLERANCE)
