"""Mechanisms with softmaxes and means over all tokens: efficient, agent, rala."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, per_query_head, scores, weighted

NAMES = ("efficient", "agent", "rala")
AGENTS = 4


def build(name: str, **options):
    options |= {"num_agents": AGENTS} if name == "agent" and "num_agents" not in options else {}
    return create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, **options)


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q.softmax(-1), k.softmax(-2))
    return weighted(weights, v, causal=False, normalized=False)


def through_agents(agents: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    asked = (scores(agents, k) / 6**0.5).softmax(-1) @ per_query_head(v, 4)
    return (q @ agents.mT / 6**0.5).softmax(-1) @ asked


def agent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    agents = F.adaptive_avg_pool1d(q.flatten(0, 1).mT, AGENTS).mT.unflatten(0, q.shape[:2])
    return through_agents(agents, q, k, v)


def rala(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    mean = torch.stack([q[:, :2].mean((1, 2)), q[:, 2:].mean((1, 2))], dim=1)  # heads that share keys
    alpha = k.shape[2] * (torch.einsum("bhd,bhsd->bhs", mean, k) / 6**0.5).softmax(-1)
    return weighted(scores(q, k * alpha.unsqueeze(-1)), v, causal=False, eps=1e-6 * k.shape[2])


FORMULAS = {"efficient": efficient, "agent": agent, "rala": rala}


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_formula(name, impl):
    q, k, v = draw()
    torch.testing.assert_close(build(name, impl=impl)(q, k, v), FORMULAS[name](q, k, v), **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_queries_of_another_sequence(name):
    q, k, v = draw()
    k, v = k[:, :, :7], v[:, :, :7]
    torch.testing.assert_close(build(name)(q, k, v), FORMULAS[name](q, k, v), **TOLERANCE)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_and_padded(name, impl):
    """Two packed sequences with padding inside: each is the formula over its own real tokens."""
    q, k, v = (x[:1] for x in draw())
    mask = torch.ones(1, 11, dtype=torch.bool)
    mask[0, [1, 6]] = False
    filled = [x.masked_fill(~mask[:, None, :, None], 1e3) for x in (q, k, v)]
    found = build(name, impl=impl)(*filled, key_mask=mask, cu_seqlens=torch.tensor([0, 4, 4, 11]))
    for tokens in ([0, 2, 3], [4, 5, 7, 8, 9, 10]):
        expected = FORMULAS[name](*(x[:, :, tokens] for x in (q, k, v)))
        torch.testing.assert_close(found[:, :, tokens], expected, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_any_size_leaves_no_trace(name):
    """NaN, and scores of padding beyond any real one, in values and gradients."""
    q, k, v = draw()
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, [1, 6]] = False
    # a key of 0, as padding becomes, then scores more than 709 above the real ones: exp of that is infinite
    far = {"q": q.abs() + 300, "k": -k.abs() - 5, "v": v}
    filled = {name: x.masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_() for name, x in far.items()}
    out = build(name)(**filled, key_mask=mask)
    expected = FORMULAS[name](*(x[:1, :, mask[0]] for x in far.values()))
    torch.testing.assert_close(out[:1, :, mask[0]], expected, rtol=1e-8, atol=1e-8)  # exponents of 1e5
    out.transpose(1, 2)[mask].sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in filled.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e3, -1e3])
def test_huge_keys_of_packed_sequences(name, size):
    q, k, v = (x[:1] for x in draw())
    k = k + size * torch.arange(1, 12)[:, None]
    found = build(name)(q, k, v, cu_seqlens=torch.tensor([0, 4, 11]))
    for tokens in (slice(0, 4), slice(4, 11)):
        expected = FORMULAS[name](*(x[:, :, tokens] for x in (q, k, v)))
        if name == "rala" and size < 0:
            assert found.isfinite().all()  # all features are 0
        else:
            torch.testing.assert_close(found[:, :, tokens], expected, rtol=1e-9, atol=1e-9)  # exponents of 1e4


@pytest.mark.parametrize("name", NAMES)
def test_no_keys_at_all(name):
    q = torch.randn(2, 4, 3, 6)
    empty = torch.zeros(2, 2, 0, 6)
    assert torch.equal(build(name)(q, empty, empty), torch.zeros(2, 4, 3, 6))


@pytest.mark.parametrize("name", NAMES)
def test_long_rows_in_fp16(name):
    """Each of 5000 keys has a share near 1/5000: below fp16's normal numbers, were it kept as such."""
    q, k, v = (x[:1].half() for x in draw(length=5000))
    mechanism = build(name)
    exact = mechanism(q.double(), k.double(), v.double() + 1)
    found = mechanism(q, k, v + 1)
    assert found.dtype == torch.float16
    # values near 1: features of 11 bits, averaged over thousands of terms, and one rounding of v and of the output
    assert (found.double() - exact).abs().max() <= 2**-9


@pytest.mark.parametrize("shape", [(3, 5), (1, 11), (4, 4), (7, 3)])
def test_agents_of_the_plane(shape):
    length = math.prod(shape)
    q, k, v = draw(length=length)
    plane = q.mT.unflatten(-1, shape).flatten(0, 1)
    agents = F.adaptive_avg_pool2d(plane, 2).flatten(2).mT.unflatten(0, q.shape[:2])
    expected = through_agents(agents, q, k, v)
    mechanism = build("agent")
    torch.testing.assert_close(mechanism(q, k, v, spatial_shape=shape), expected, **TOLERANCE)
    packed = [torch.cat(list(x.split(1)), dim=2) for x in (q, k, v)]
    found = mechanism(*packed, spatial_shape=shape, cu_seqlens=torch.tensor([0, length, 2 * length]))
    torch.testing.assert_close(torch.cat(found.split(length, dim=2)), expected, **TOLERANCE)


def test_bins_of_the_plane_hold_real_tokens_only():
    """A padded column lowers no mean, and bins of padding alone have no agent."""
    q, k, v = draw(length=16)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, :, 2:] = False  # the right half: two of four bins
    mask[1, :, 3] = False
    found = build("agent")(q, k, v, key_mask=mask.flatten(1), spatial_shape=(4, 4))
    for row in range(2):
        kept = mask[row].flatten()
        plane = q[row].unflatten(1, (4, 4))
        bins = [plane[:, i : i + 2, j : j + 2][:, mask[row, i : i + 2, j : j + 2]] for i in (0, 2) for j in (0, 2)]
        agents = torch.stack([own.mean(1) for own in bins if own.shape[1]], dim=1)[None]
        expected = through_agents(agents, *(x[row : row + 1, :, kept] for x in (q, k, v)))
        torch.testing.assert_close(found[row : row + 1, :, kept], expected, **TOLERANCE)


def test_bad_spatial_shape():
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"spatial_shape \(3, 4\) must hold all tokens of a sequence, got T = 11"):
        build("agent")(q, k, v, spatial_shape=(3, 4))
    with pytest.raises(ValueError, match="spatial_shape must be a pair of integers >= 1"):
        build("agent")(q, k, v, spatial_shape=(11,))
    with pytest.raises(ValueError, match="spatial_shape needs num_agents to be a square, got 5"):
        build("agent", num_agents=5)(q, k, v, spatial_shape=(1, 11))
    q, k, v = (x[:1, :, :10] for x in (q, k, v))
    with pytest.raises(ValueError, match=r"spatial_shape \(1, 5\) must hold all tokens of a sequence"):
        build("agent")(q, k, v, spatial_shape=(1, 5), cu_seqlens=torch.tensor([0, 4, 10]))
