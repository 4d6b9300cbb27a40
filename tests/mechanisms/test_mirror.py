"""MirrorLA against its formula written with full matrices, and what the reflections promise."""

import math

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from linattn.testing import check_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted

EQUAL = {"num_heads": 4, "head_dim": 6}
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "cross_head": False}
OPTIONS = [
    EQUAL,
    EQUAL | {"reflections": 2},
    EQUAL | {"modulation": "token"},
    EQUAL | {"modulation": "none"},
    EQUAL | {"modulation": "none", "cross_head": False, "reflections": 2},
    EQUAL | {"causal": True},
    EQUAL | {"causal": True, "modulation": "none", "reflections": 2},
    GROUPED,
    GROUPED | {"modulation": "token", "reflections": 2},
    GROUPED | {"causal": True},
]


def build(moved: bool = True, **options):
    torch.manual_seed(0)
    mechanism = create_mechanism("mirror", **options).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * moved)
    return mechanism


def draw_for(options: dict, **more) -> tuple[Tensor, ...]:
    return draw(kv_heads=options.get("num_kv_heads", 4), **more)


def householder(u: Tensor) -> Tensor:
    return torch.eye(len(u), dtype=u.dtype) - 2 * torch.outer(u, u) / u.dot(u)


def expected_reflection(mechanism, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """One matrix per batch row, token and head, entry by entry from the definitions."""
    H, G, D = mechanism.num_heads, mechanism.num_kv_heads, mechanism.head_dim
    with torch.no_grad():
        if mechanism.normals is not None:
            for w in mechanism.normals:
                matrix = householder(w.flatten())
                q, k = (
                    torch.einsum("ij,btj->bti", matrix, x.transpose(1, 2).flatten(2))
                    .unflatten(2, (H, D))
                    .transpose(1, 2)
                    for x in (q, k)
                )
        out_q, out_k = q.clone(), k.clone()
        for b in range(q.shape[0]):
            for g in range(G):
                own = slice(g * H // G, (g + 1) * H // G)
                for i in range(D // 2):
                    pair = slice(2 * i, 2 * i + 2)
                    for t in range(q.shape[2]):
                        sample = torch.cat([q[b, own, :, pair], k[b, g : g + 1, :, pair]])  # (heads, T, 2)
                        if mechanism.modulation == "sequence":
                            variance = sample.flatten(0, 1).var(0, unbiased=False).mean()
                        else:
                            variance = ((sample[:, t, 0] - sample[:, t, 1]) / 2).square().mean()
                        shift = 0.0
                        if mechanism.modulation != "none":
                            a, c, d = (p[g, i] for p in (mechanism.amplitude, mechanism.gain, mechanism.bias))
                            shift = math.pi / 2 * a.tanh() * (c * (variance + 1e-6).log() + d).tanh()
                        angles = list(mechanism.angles[:, g, i])
                        angles[-1] = angles[-1] + shift
                        matrix = torch.eye(2, dtype=torch.float64)
                        for angle in angles:
                            matrix = householder(torch.stack([angle.cos(), angle.sin()])) @ matrix
                        out_q[b, own, t, pair] = q[b, own, t, pair] @ matrix.mT
                        out_k[b, g, t, pair] = matrix @ k[b, g, t, pair]
        return out_q, out_k


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_formula(options):
    q, k, v = draw_for(options, length=5)
    mechanism = build(**options)
    reflected = mechanism.reflect(q, k)
    expected = expected_reflection(mechanism, q, k)
    torch.testing.assert_close(reflected, expected, **TOLERANCE)
    causal = options.get("causal", False)
    weights = scores(*(x * (x > 0) for x in expected))
    eps = 1e-6 if causal else 5e-6  # the mean over 5 keys plus 1e-6
    torch.testing.assert_close(mechanism(q, k, v), weighted(weights, v, causal, eps=eps), **TOLERANCE)


@pytest.mark.parametrize("impl", FORMS)
def test_eps_is_added_to_the_mean_of_the_real_keys(impl):
    """With weights near 1e-6 eps is half of the denominator, so that counting it wrongly shows."""
    q, k, v = draw(kv_heads=4)
    q, k = 1e-3 * q, 1e-3 * k
    mechanism = build(**EQUAL, impl=impl)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 7:] = False
    out = mechanism(q, k, v, key_mask=mask)
    for row, length in ((0, 7), (1, 11)):
        alone = [x[row : row + 1, :, :length] for x in (q, k, v)]
        expected = weighted(
            scores(*(x.relu() for x in mechanism.reflect(*alone[:2]))), alone[2], False, eps=length * 1e-6
        )
        torch.testing.assert_close(out[row : row + 1, :, :length], expected, **TOLERANCE)
    packed = mechanism(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 4, 4, 11]))
    for start, stop in ((0, 4), (4, 11)):
        alone = mechanism(*(x[:1, :, start:stop] for x in (q, k, v)))
        torch.testing.assert_close(packed[:, :, start:stop], alone, **TOLERANCE)


@pytest.mark.parametrize("modulation", ["sequence", "token", "none"])
def test_two_reflections_start_as_the_identity(modulation):
    q, k, v = draw(kv_heads=4)
    mechanism = build(moved=False, **EQUAL, reflections=2, modulation=modulation)
    torch.testing.assert_close(mechanism.reflect(q, k), (q, k), **TOLERANCE)
    torch.testing.assert_close(
        mechanism(q, k, v), weighted(scores(q.relu(), k.relu()), v, False, eps=1.1e-5), **TOLERANCE
    )


def test_starting_values():
    mechanism = create_mechanism("mirror", num_heads=8, head_dim=64)
    assert mechanism.num_parameters == 3 * 512  # 4 (H, D/2) and one (H D)
    assert mechanism.angles.abs().max() <= math.pi
    # 256 draws of a uniform distribution and 512 of a normal one: deviations are met to a few percent
    assert mechanism.angles.std().item() == pytest.approx(math.pi / 3**0.5, rel=0.15)
    assert mechanism.normals.norm().item() == pytest.approx(1, rel=0.15)
    assert not mechanism.amplitude.any()
    assert not mechanism.bias.any()
    assert torch.equal(mechanism.gain, torch.ones(8, 32))


def test_energy_loss():
    q, k, _ = draw()
    mechanism = build(**GROUPED)
    y = torch.cat([x.flatten() for x in mechanism.reflect(q, k)])
    expected = y[y < 0].square().sum() / y.square().sum()
    torch.testing.assert_close(mechanism.energy_loss(q, k), expected, **TOLERANCE)
    assert 0 < expected < 1
    mask = torch.arange(11).expand(2, -1) < 6
    padded = mechanism.energy_loss(q.masked_fill(~mask[:, None, :, None], 9.0), k, key_mask=mask)
    torch.testing.assert_close(padded, mechanism.energy_loss(q[:, :, :6], k[:, :, :6]), **TOLERANCE)
    offsets = torch.tensor([0, 4, 11])
    y = [mechanism.reflect(q[:1, :, s:e], k[:1, :, s:e]) for s, e in ((0, 4), (4, 11))]
    y = torch.cat([x.flatten() for pair in y for x in pair])
    packed = mechanism.energy_loss(q[:1], k[:1], cu_seqlens=offsets)
    torch.testing.assert_close(packed, y[y < 0].square().sum() / y.square().sum(), **TOLERANCE)
    zero = torch.zeros(1, 4, 3, 6, dtype=torch.float64)
    assert mechanism.energy_loss(zero, zero[:, :2]) == 0


@pytest.mark.parametrize("modulation", ["sequence", "none"])
def test_keys_of_another_length(modulation):
    q, k, v = draw(kv_heads=4)
    k, v = k[:, :, :7], v[:, :, :7]
    mechanism = build(**EQUAL, modulation=modulation)
    reflected = mechanism.reflect(q, k)
    expected = weighted(scores(*(x.relu() for x in reflected)), v, False, eps=7e-6)
    torch.testing.assert_close(mechanism(q, k, v), expected, **TOLERANCE)
    mask = torch.arange(7).expand(2, -1) < 5
    short = mechanism(q, k[:, :, :5], v[:, :, :5])
    torch.testing.assert_close(mechanism(q, k, v, key_mask=mask), short, **TOLERANCE)


def test_lengths_that_do_not_fit():
    q, k, v = draw(kv_heads=4)
    k, v = k[:, :, :7], v[:, :, :7]
    with pytest.raises(ValueError, match="k has length 7, but q has 11"):
        build(**EQUAL, modulation="token")(q, k, v)
    with pytest.raises(ValueError, match="q has length 11, but k has 7"):
        build(**EQUAL)(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 7]))


@pytest.mark.parametrize(
    "options",
    [{"cross_head": False, "reflections": 2}, {"modulation": "none", "cross_head": False}, {"modulation": "token"}],
    ids=str,
)
def test_contracts_with_other_options(options):
    """The contracts of the registry know the defaults, whose cross-head reflection leaves grouped heads out."""
    report = check_mechanism("mirror", ["forms", "padding", "hand_over", "gradients"], **options)
    grouped = [case for case in report.passed["forms"] if "grouped" in case]
    assert bool(grouped) != options.get("cross_head", True)
