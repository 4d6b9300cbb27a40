"""Cores: whole, in pieces and token by token they are one thing; their parts switch off; and their features."""

import pytest
import torch
from torch.testing import assert_close

from linattn.convert.convert import exact_attention
from linattn.convert.core import HedgehogMap, NPMap, RandomFeatures, T2RMap, build_core
from linattn.convert.plan import LayerPlan, LayerShape

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, hidden=12, causal=True)
B, T = 2, 23
PLANS = {
    "still": LayerPlan("hybrid", window=4, ratio=1 / 4, sinks=1, gate=True, linear_weight=2.0),
    "units of one": LayerPlan("hybrid", window=4, ratio=1 / 4, sinks=1, gate=True, linear_weight=2.0, units="one"),
    "cap": LayerPlan("hybrid", window=4, ratio=1 / 2, cap=3, sinks=1),
    "sliding": LayerPlan("hybrid", "hedgehog", feature_dim=3, window=4, layout="sliding"),
    "window alone": LayerPlan("hybrid", "none", window=4),
    "prf": LayerPlan("hybrid", "prf", feature_dim=6, window=4, units="one"),
    "linear prf": LayerPlan("hybrid", "prf", feature_dim=6, window=0, gate=True),
    "t2r": LayerPlan("hybrid", "t2r", window=0),
    "mirror": LayerPlan("mechanism", mechanism="mirror", options={"cross_head": False}),
    "zeros_softmax": LayerPlan("mechanism", mechanism="zeros_softmax"),
}


def inputs(shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    sizes = [(B, heads, T, shape.head_dim) for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    q, k, v, x = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (*sizes, (B, T, shape.hidden))
    )
    return q, k, v, x


def core_of(plan, shape=SHAPE):
    torch.manual_seed(1)
    core = build_core(plan, shape).double()
    for parameter in core.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return core


@pytest.mark.parametrize("name", PLANS)
@torch.no_grad()
def test_whole_pieces_and_steps_agree_with_padding(name):
    core, (q, k, v, x) = core_of(PLANS[name]), inputs()
    mask = torch.arange(T) >= torch.tensor([[0], [6]])
    whole = core(q, k, v, x=x, key_mask=mask)
    alone = core(q[1:, :, 6:], k[1:, :, 6:], v[1:, :, 6:], x=x[1:, 6:])
    assert_close(whole[1:, :, 6:], alone)
    outs, state = [], None
    for piece in (slice(0, 9), slice(9, 10), slice(10, 17)):
        tensors = (tensor[:, :, piece] for tensor in (q, k, v))
        out, state = core.with_state(*tensors, state=state, x=x[:, piece], key_mask=mask[:, piece])
        outs.append(out)
    for t in range(17, T):
        out, state = core.decode(q[:, :, [t]], k[:, :, [t]], v[:, :, [t]], state, x=x[:, [t]])
        outs.append(out)
    assert_close(torch.cat(outs, 2) * mask[:, None, :, None], whole * mask[:, None, :, None])


@pytest.mark.parametrize("units", ["row_max", "one"])
@torch.no_grad()
def test_a_window_over_everything_is_softmax(units):
    everything = LayerPlan("hybrid", window=T, ratio=1 / 4, linear_weight=3.0, gate=True, units=units)
    core, (q, k, v, x) = core_of(everything), inputs()
    assert_close(core(q, k, v, x=x), exact_attention(q, k, v, None, causal=True))


@pytest.mark.parametrize("units", ["row_max", "one"])
def test_a_learned_weight_counts_in_numerator_and_denominator(units):
    core, (q, k, v, _x) = core_of(LayerPlan("hybrid", window=4, delay=0, linear_weight=0.5, units=units)), inputs()
    with torch.no_grad():
        core.log_weight.copy_(torch.tensor([0.1, 0.5, 1.0, 7.0]).log())  # another for each head
        phi, psi = core.features(q, k)
    factor = core.log_weight.exp()
    outs = []
    for h in range(SHAPE.num_heads):
        keys, features, values = k[:, h // 2], psi[:, h // 2], v[:, h // 2]
        rows = []
        for t in range(T):
            first = t // 4 * 4  # of the chunk that is exact
            logits = (q[:, h, t, None] * keys[:, first : t + 1]).sum(-1) * SHAPE.head_dim**-0.5
            exact = (logits - logits.amax(-1, keepdim=True)).exp() if units == "row_max" else logits.exp()
            linear = factor[h] * (phi[:, h, t, None] * features[:, :first]).sum(-1)
            weights = torch.cat([linear, exact], 1)
            rows.append((weights.unsqueeze(-1) * values[:, : t + 1]).sum(1) / weights.sum(-1, keepdim=True))
        outs.append(torch.stack(rows, 1))
    wanted, found = torch.stack(outs, 1), core(q, k, v)
    assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), core.log_weight)[0] for out in (found, wanted)]
    assert_close(*gradients)
    assert (gradients[0].abs() > 1e-3).all()


@pytest.mark.parametrize("name", ["still", "units of one"])
@torch.no_grad()
def test_switches_take_parts_away(name):
    core, (q, k, v, x) = core_of(PLANS[name]), inputs()
    window = core_of(PLANS["window alone"])(q, k, v)
    full = core(q, k, v, x=x)
    core.zero_linear = True
    exact = core(q, k, v, x=x)
    core.zero_salient = True
    assert_close(core(q, k, v, x=x), window)
    late = slice(12, None)  # before that the window has everything
    for one, other in ((full, exact), (exact, window), (full, window)):
        assert (one - other)[:, :, late].abs().amax() > 1e-2


@torch.no_grad()
def test_a_bidirectional_layer_is_linear_over_all_keys():
    shape = SHAPE._replace(causal=False)
    core, (q, k, v, _) = core_of(LayerPlan("hybrid", "hedgehog", window=0), shape), inputs(shape)
    phi, psi = core.feature_pair(q, k)
    weights = phi @ psi.repeat_interleave(2, 1).mT
    wanted = weights @ v.repeat_interleave(2, 1) / (weights.sum(-1, keepdim=True) + 1e-6)
    assert_close(core(q, k, v), wanted)
    with pytest.raises(ValueError, match="bidirectional"):
        build_core(LayerPlan("hybrid"), shape)


def test_every_parameter_learns_and_padding_may_hold_nan():
    mask = torch.arange(T) >= torch.tensor([[0], [6]])
    for name in PLANS.keys() - {"window alone"}:  # which has none
        core, (q, k, v, x) = core_of(PLANS[name]), inputs()
        for tensor, hidden in ((q, ~mask[:, None]), (k, ~mask[:, None]), (v, ~mask[:, None]), (x, ~mask)):
            tensor[hidden.expand(tensor.shape[:-1])] = torch.nan
        out = core(q, k, v, x=x, key_mask=mask)
        out[mask[:, None].expand(out.shape[:-1])].square().sum().backward()
        for key, parameter in core.named_parameters():
            assert parameter.grad is not None, (name, key)
            assert 0 < parameter.grad.abs().sum() < torch.inf, (name, key)


HEADS, KV_HEADS, N, D = 4, 2, 5, 8


def draw(*shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale


def test_np_starts_as_softmax_of_the_input_and_keeps_its_norm():
    x, np_map = draw(2, HEADS, N, D), NPMap(HEADS, D, D).double()
    assert_close(np_map(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1), rtol=1e-5, atol=1e-6)
    torch.nn.init.normal_(np_map.weight)
    first = np_map(x)[..., :D].log()
    u = first - first.mean(-1, keepdim=True)  # softmax gives u up to a constant
    for h in range(HEADS):
        f = x[:, h] @ np_map.weight[h]
        wanted = f / f.norm(dim=-1, keepdim=True) * x[:, h].norm(dim=-1, keepdim=True)
        assert_close(u[:, h], wanted - wanted.mean(-1, keepdim=True), rtol=1e-6, atol=1e-6)


def test_np_has_gradients_at_zero_vectors():
    x = torch.zeros(1, HEADS, 1, D, requires_grad=True)
    np_map = NPMap(HEADS, D, 3)
    np_map(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *np_map.parameters()))


def test_hedgehog_and_t2r_are_their_formulas():
    x = draw(2, HEADS, N, D)
    hedgehog, t2r = HedgehogMap(HEADS, D, 3).double(), T2RMap(HEADS, D, 3).double()
    torch.nn.init.normal_(t2r.bias)
    assert_close(hedgehog(x)[..., 3:], torch.softmax(-x @ hedgehog.weight, -1))
    assert_close(t2r(x), (x @ t2r.weight + t2r.bias).relu())
    assert_close(HedgehogMap(HEADS, D, D).double()(x)[..., :D], x.softmax(-1))


@pytest.mark.parametrize("centred", [False, True])
def test_random_features_average_to_the_exponential(centred):
    """With many features ``phi(q) . psi(k) = e^{q . k / sqrt(D)}``, whatever constant was taken from the keys."""
    torch.manual_seed(0)
    q, k = draw(1, HEADS, N, D, scale=0.4), draw(1, KV_HEADS, N, D, scale=0.4) + 0.5
    features = RandomFeatures(KV_HEADS, D, 40_000).double()
    if centred:
        features.center.copy_(k.mean((0, 2)))
        features.log_unit.copy_(torch.tensor([0.5, -1.0]))
    phi, psi = features(q, k)
    found = phi @ psi.repeat_interleave(2, 1).mT
    assert_close(found, (q @ k.repeat_interleave(2, 1).mT / D**0.5).exp(), rtol=0.1, atol=0.0)
    # In units of their largest feature queries differ by a factor per row, and do not overflow.
    features.relative = True
    relative, _ = features(q, k)
    ratio = relative / phi
    assert_close(ratio, ratio[..., :1].expand_as(ratio))
    assert features(q * 100, k)[0].amax(-1).eq(1).all()


def test_maps_do_not_work_in_16_bits():
    x = draw(1, HEADS, N, D).bfloat16()
    for kind in (NPMap, HedgehogMap, T2RMap):
        own = kind(HEADS, D, D).bfloat16()
        wanted = kind(HEADS, D, D).double()
        wanted.load_state_dict(own.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            found = own(x)
        assert found.dtype == torch.float32
        assert_close(found.double(), wanted(x.double()), rtol=1e-4, atol=1e-5)
