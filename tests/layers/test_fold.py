"""A folded layer is the same function."""

import pytest
import torch

from linattn.layers import Attention

PLANE = (2, 3)
CASES = {
    "plain": {},
    "no bias": {"qkv_bias": False},
    "every part": {"local": "channel", "gate": "silu", "norm": "layer", "rotary": "features", "key_position": (2, 3)},
    "reduced keys": {"spatial_reduction": 2, "key_position": (1, 2)},
    "causal": {"causal": True},
    "grouped": {"num_kv_heads": 2, "mechanism_options": {"cross_head": False}},
    "two reflections": {"mechanism_options": {"reflections": 2}},
}


def build(mechanism="mirror", **options):
    torch.manual_seed(0)
    own = {"modulation": "none"} if mechanism == "mirror" else {}
    options["mechanism_options"] = own | options.get("mechanism_options", {})
    layer = Attention(16, 4, mechanism, **options).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_equal(case):
    layer = build(**CASES[case])
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plane = {} if layer.causal else {"spatial_shape": PLANE}
    before, angles = layer(x, **plane), layer.mechanism.num_parameters
    assert layer.fold() is layer
    assert layer.mechanism.num_parameters == 0 < angles
    torch.testing.assert_close(layer(x, **plane), before, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "elu"}, "mechanism 'elu' has no reflection that could be folded"),
        ({"qk_norm": "rms"}, "qk_norm='rms' stands between the projections and the reflection"),
        ({"canon": "b"}, "canon='b' stands between the projections and the reflection"),
        ({"rotary": 0.5}, "rotary=0.5 stands between the projections and the reflection"),
        ({"mechanism_options": {"modulation": "sequence"}}, "modulation='sequence' makes the reflection depend on"),
    ],
)
def test_a_refused_layer_is_left_as_it_was(options, message):
    layer = build(**options)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        layer.fold()
    assert all(torch.equal(before[name], x) for name, x in layer.state_dict().items())
