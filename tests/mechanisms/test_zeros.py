import itertools
import math

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from linattn.mechanisms.zeros import Zeros, centred
from linattn.testing import check_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, draw_x, per_query_head

ALL_FORMS = (*FORMS, "chunked")
OPTIONS = [{}, {"zero_order": "tanh"}, *({"logit": name} for name in ("quadratic", "mean", "l1", "rms"))]


def build(head_norm: bool = False, **options):
    torch.manual_seed(0)
    mechanism = create_mechanism(
        "zeros", num_heads=4, num_kv_heads=2, head_dim=6, input_dim=10, head_norm=head_norm, **options
    ).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return mechanism


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()


def logits_of(mechanism, x: Tensor, causal: bool) -> Tensor:
    """z (B, H_kv, T), token by token."""
    u = (x @ mechanism.u_map.weight.T + mechanism.u_map.bias).reshape(2, -1, 2, 6).transpose(1, 2)
    z = torch.zeros(u.shape[:3], dtype=u.dtype)
    for s in range(u.shape[2]):
        own = u[:, :, s]
        if mechanism.logit in ("quadratic", "mean"):
            z[:, :, s] = (own**2 if mechanism.logit == "quadratic" else own).sum(-1) / 6
            continue
        seen = u[:, :, : s + 1] if causal else u
        weight = mechanism.prior_log_tau.exp()[:, None]
        mean = (weight * mechanism.prior_mu + seen.sum(2)) / (weight + seen.shape[2])
        if mechanism.logit == "deviation":
            z[:, :, s] = -(own * mean).sum(-1) / math.sqrt(6)
        elif mechanism.logit == "l1":
            z[:, :, s] = (own - mean).abs().sum(-1) / 6
        else:
            z[:, :, s] = ((own - mean).square().sum(-1) / 6 + 1e-12).sqrt()
    return z


def gates_of(mechanism, x: Tensor) -> list[Tensor]:
    """g1, gh and g0, (B, H, T)."""
    values = (x @ mechanism.gate_map.weight.T + mechanism.gate_map.bias).transpose(1, 2)
    found = [values[:, :4].sigmoid(), values[:, 4:8].sigmoid()]
    if mechanism.zero_order is None:
        return [*found, torch.zeros_like(found[0])]
    return [*found, values[:, 8:].tanh() if mechanism.zero_order == "tanh" else values[:, 8:].sigmoid()]


def radial(z: Tensor, gates: list[Tensor], causal: bool) -> Tensor:
    """r (B, H, T, T), row by row from the definition."""
    z = per_query_head(z, 4)
    r = torch.zeros(*z.shape, z.shape[2], dtype=z.dtype)
    for t in range(z.shape[2]):
        count = t + 1 if causal else z.shape[2]
        seen = z[:, :, :count]
        delta = seen - seen.mean(-1, keepdim=True)
        epsilon = seen.softmax(-1) - 1 / count - delta / count
        g1, gh, g0 = (gate[:, :, t, None] for gate in gates)
        r[:, :, t, :count] = g1 * delta / count + gh * epsilon + g0 / count
    return r


def explicit(mechanism, q: Tensor, k: Tensor, v: Tensor, x: Tensor, causal: bool) -> Tensor:
    r = radial(logits_of(mechanism, x, causal), gates_of(mechanism, x), causal)
    cosine = torch.einsum("bhtd,bhsd->bhts", unit(q), per_query_head(unit(k), 4))
    return (r * cosine) @ per_query_head(v, 4)


@pytest.mark.parametrize("options", [*OPTIONS, {"zero_order": "sigmoid"}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", ALL_FORMS)
def test_formula(impl, causal, options):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(causal=causal, impl=impl, **options)
    expected = explicit(mechanism, q, k, v, x, causal)
    torch.testing.assert_close(mechanism(q, k, v, x=x), expected, **TOLERANCE)


@pytest.mark.parametrize("spread", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("offsets", [None, (0, 0, 1, 9, 9, 41, 60)])
def test_centred_sums_give_the_same(offsets, spread, monkeypatch):
    """What inputs in 16 bits take, in fp64: with gradients, heads in groups, empty sequences and one of a token."""
    length = 60
    leaves = [t[:1].clone().requires_grad_() for t in (*draw(length=length), draw_x(length))]
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    mechanism = build(causal=True, zero_order="tanh")
    torch.nn.init.normal_(mechanism.u_map.weight, std=spread)

    def results() -> list[Tensor]:
        q, k, v, x = leaves
        output = mechanism(q, k, v, x=x, cu_seqlens=cu_seqlens)
        return [output, *torch.autograd.grad(output.square().sum(), [*leaves, *mechanism.parameters()])]

    plain, weigh = results(), Zeros._causal
    monkeypatch.setattr(Zeros, "_causal", lambda self, *given, tf32: weigh(self, *given, tf32=True))
    found = results()
    assert not torch.equal(found[0], plain[0])
    torch.testing.assert_close(found, plain, **TOLERANCE)


def test_head_norm_is_a_layer_norm_without_weights():
    q, k, v = draw()
    x = draw_x()
    plain, normed = build(causal=True)(q, k, v, x=x), build(True, causal=True)(q, k, v, x=x)
    centred = plain - plain.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(normed, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("head_norm", [True, False])
def test_the_first_causal_token_gives_zero(head_norm, dtype):
    q, k, v = (t.to(dtype) for t in draw())
    mechanism = build(head_norm, causal=True).to(dtype)
    found = mechanism(q, k, v, x=draw_x().to(dtype))
    assert not found[:, :, 0].any()
    assert found[:, :, 1:].abs().amax((0, 1, 3)).min() > 0
    packed = mechanism(q[:1], k[:1], v[:1], x=draw_x()[:1].to(dtype), cu_seqlens=torch.tensor([0, 4, 11]))
    assert not packed[:, :, [0, 4]].any()
    padded = torch.arange(11).expand(2, -1) >= 3
    assert not mechanism(q, k, v, x=draw_x().to(dtype), key_mask=padded)[:, :, 3].any()
    alone = build(head_norm).to(dtype)(q[:, :, :1], k[:, :, :1], v[:, :, :1], x=draw_x(1).to(dtype))
    assert not alone.any()


@pytest.mark.parametrize("size", [120.0, 1e6])
@pytest.mark.parametrize("impl", ALL_FORMS)
def test_a_late_outlier_does_not_move_the_past(impl, size):
    """Exponentials in units of the largest of the whole sequence would be 0 for all tokens before it."""
    q, k, v = (t.float() for t in draw())
    x = draw_x()
    mechanism = build(causal=True, impl=impl).float()
    logits = mechanism.logits

    def with_outlier(*given: Tensor) -> Tensor:
        z = logits(*given).clone()
        z[:, :, -1] = size
        return z

    before = mechanism(q, k, v, x=x.float())
    mechanism.logits = with_outlier
    found = mechanism(q, k, v, x=x.float())
    assert torch.equal(found[:, :, :-1], before[:, :, :-1])
    assert found.isfinite().all()
    exact = explicit(build(causal=True), q.double(), k.double(), v.double(), x, True)
    torch.testing.assert_close(found[:, :, :-1].double(), exact[:, :, :-1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_rotary_positions_count_by_their_distance(causal):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(causal=causal)
    frequencies = 100.0 ** -torch.linspace(0, 1, 3, dtype=torch.float64)

    def rotation(start: int):
        angle = (torch.arange(11) + start)[:, None] * frequencies
        cos, sin = angle.cos(), angle.sin()

        def turn(x: Tensor) -> Tensor:
            a, b = x[..., :3], x[..., 3:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        return lambda q, k: (turn(q), turn(k))

    one, moved = (mechanism(q, k, v, x=x, rotate=rotation(start)) for start in (0, 57))
    torch.testing.assert_close(one, moved, **TOLERANCE)
    assert (one - mechanism(q, k, v, x=x)).abs().max() > 1e-3
    turned = explicit(mechanism, *rotation(0)(q, k), v, x, causal)
    torch.testing.assert_close(one, turned, **TOLERANCE)


@pytest.mark.parametrize("width", [64, 512])
def test_maps_start_the_same_at_every_width(width):
    torch.manual_seed(0)
    mechanism = create_mechanism("zeros", num_heads=width // 64, head_dim=64, input_dim=width)
    for linear in (mechanism.u_map, mechanism.gate_map):
        assert abs(linear.weight.std().item() - 0.02) < 0.002
        assert not linear.bias.any()


def test_contracts_of_other_options():
    contracts = ["causality", "hand_over", "gradients", "scaling"]
    assert check_mechanism("zeros", contracts, zero_order="tanh", logit="rms", head_norm=False)


def test_state_of_another_shape():
    q, k, v = draw()
    mechanism = build(causal=True)
    _, state = mechanism.with_state(q, k, v, x=draw_x())
    with pytest.raises(ValueError, match=r"state\.kv must have shape \(2, 2, 6, 12\), got \(2, 2, 6, 6\)"):
        mechanism.with_state(q, k, v, x=draw_x(), state=state._replace(kv=state.exp_kv))
    assert state.position.tolist() == [11, 11]


def test_centres_of_packed_sequences_are_their_own():
    """Another sequence has no part in them, not even by its NaN."""
    offsets = [0, 0, 1, 4, 5, 5, 9]
    z, scale, cu_seqlens = torch.randn(1, 2, 9, 1), torch.randn(1, 2, 9), torch.tensor(offsets)
    whole = centred(z, scale, cu_seqlens)
    for start, end in itertools.pairwise(offsets):
        part = slice(start, end)
        others = torch.full_like(z, torch.nan)
        others[:, :, part] = z[:, :, part]
        expected = [x[:, :, part] for x in whole]
        found = [x[:, :, part] for x in centred(others, scale, cu_seqlens)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if end - start > 1:
            alone = list(centred(z[:, :, part], scale[:, :, part], None))
            torch.testing.assert_close(alone, expected, rtol=0, atol=0)
