"""What a mechanism says it costs is what can be counted; every mechanism runs in every precision."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linattn import create_mechanism
from linattn.ops.linear import api as linear
from mechanisms.formulas import draw

LINEAR = ("cosformer", "elu", "gated", "hedgehog", "performer", "relu", "retention", "taylor")
OPTIONS = [(name, {}) for name in LINEAR] + [("gated", {"gate": "head"}), ("taylor", {"feature_dim": None})]
LENGTH = 11


def build(name: str, **options):
    torch.manual_seed(0)
    return create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, **options)


def draw_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    q, k, v = (x.to(dtype) for x in draw(length=LENGTH))
    return {"q": q, "k": k, "v": v, "x": torch.randn(2, LENGTH, 24, dtype=dtype)}


@pytest.mark.parametrize(("name", "options"), [*OPTIONS, ("softmax", {})])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_state_size(name, options, length):
    mechanism = build(name, causal=True, **options)
    inputs = {key: x[:, :length] if key == "x" else x[:, :, :length] for key, x in draw_inputs(torch.float32).items()}
    _, state = mechanism.with_state(**inputs)
    held = sum(part.numel() for part in state if part is not None)
    assert mechanism.state_size(length) * 2 == held  # a batch of two


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_flops_of_linear_mechanisms(name, options):
    """Counted: the products of its own maps, the sum over keys and the read of every query."""
    q, k, v, x = (t[:1] for t in draw_inputs(torch.float32).values())
    mechanism = build(name, causal=True, **options)
    with FlopCounterMode(display=False) as own:
        if name == "performer":
            mechanism.log_features(q), mechanism.log_features(k)
        elif name != "cosformer":
            mechanism.arguments(q, k, v, x=x)
    phi, psi = (torch.randn(1, t.shape[1], LENGTH, mechanism.num_features) for t in (q, k))
    with FlopCounterMode(display=False) as products:
        state = psi.mT @ torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        phi @ state.repeat_interleave(2, dim=1)
    assert mechanism.flops(LENGTH) == own.get_total_flops() + products.get_total_flops()
    sweeps = 2 if name in ("gated", "retention") else 1  # a bidirectional decay goes both ways
    both_ways = build(name, **options).flops(LENGTH)
    assert both_ways == own.get_total_flops() + sweeps * products.get_total_flops()


def test_flops_of_softmax():
    q, k, v, _ = (t[:1] for t in draw_inputs(torch.float32).values())
    mechanism = build("softmax", impl="reference")
    with FlopCounterMode(display=False) as counted:
        mechanism(q, k, v)
    assert mechanism.flops(LENGTH) == counted.get_total_flops()
    pairs = sum(t + 1 for t in range(LENGTH))
    assert build("softmax", causal=True).flops(LENGTH) * LENGTH**2 == counted.get_total_flops() * pairs


@pytest.mark.parametrize("name", [*LINEAR, "softmax"])
def test_bad_length(name):
    mechanism = build(name)
    for count in (mechanism.state_size, mechanism.flops):
        with pytest.raises(ValueError, match="length must be an integer >= 0, got -1"):
            count(-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*LINEAR, "softmax"])
def test_precisions(name, causal):
    inputs = draw_inputs(torch.float64)
    mechanism = build(name, causal=causal).double()
    exact = mechanism(**inputs)
    assert exact.dtype == torch.float64
    half = {key: x.to(torch.bfloat16) for key, x in inputs.items()}
    in_half = mechanism.bfloat16()(**half)
    mechanism.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mechanism(**{key: x.float() for key, x in inputs.items()})
    for found in (in_half, mixed):
        assert found.dtype == torch.bfloat16
        # inputs and features carry 8 bits (2^-9 relative each); exponents of a few units multiply that
        assert (found.double() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("name", ["hedgehog", "taylor", "gated"])
def test_parameters_of_another_dtype(name):
    with pytest.raises(TypeError, match=r"q is torch\.float64, but the mechanism's parameters is torch\.float32"):
        build(name)(**draw_inputs(torch.float64))


@pytest.mark.parametrize("name", LINEAR)
def test_a_step_is_recurrent(name, monkeypatch):
    taken, choose = [], linear.choose

    def watch(*arguments, **options):
        taken.append(choose(*arguments, **options).impl)
        return choose(*arguments, **options)

    monkeypatch.setattr(linear, "choose", watch)
    q, k, v, x = draw_inputs(torch.float32).values()
    mechanism = build(name, causal=True)
    _, state = mechanism.with_state(q, k, v, x=x)
    mechanism.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state, x=x[:, 0])
    assert taken == ["chunked", "recurrent"]


@pytest.mark.parametrize("name", [*LINEAR, "softmax"])
def test_shapes_that_do_not_fit_the_mechanism(name):
    mechanism = build(name, causal=True)
    inputs = draw_inputs(torch.float32)
    with pytest.raises(ValueError, match="q has number of heads 3, but the mechanism's num_heads has 4"):
        mechanism(**inputs | {"q": inputs["q"][:, :3]})
    with pytest.raises(ValueError, match="k has head dimension 5, but the mechanism's head_dim has 6"):
        mechanism(**inputs | {"k": inputs["k"][..., :5]})
    with pytest.raises(ValueError, match="a state needs causal=True"):
        build(name).with_state(**inputs)
