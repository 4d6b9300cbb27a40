"""The part between the projections: whole, in pieces and token by token it is one thing, and its parts switch off."""

import pytest
import torch
from torch.testing import assert_close

from linattn.convert.convert import exact_attention
from linattn.convert.core import build_core
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


@torch.no_grad()
def test_16_bit_models_have_cores_in_fp32():
    """Against fp64: not worse than twice what the inputs' rounding costs."""
    for plan in (PLANS["still"], PLANS["linear prf"], PLANS["mirror"]):
        q, k, v, x = (tensor.bfloat16() for tensor in inputs())
        core = core_of(plan)
        wanted = core(*(tensor.double() for tensor in (q, k, v)), x=x.double())
        found = core.float()(q, k, v, x=x)
        assert found.dtype == torch.bfloat16
        assert (found.double() - wanted).abs().amax() <= 2**-6 * wanted.abs().amax()
