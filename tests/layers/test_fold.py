"""A folded layer is the same function."""

import pytest
import torch
import torch.nn.functional as F

from linattn import register_mechanism
from linattn.layers import Attention
from linattn.mechanisms import registry
from linattn.mechanisms.base import LinearMechanism

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
PLANE = (2, 3)


class Turned(LinearMechanism):
    """ReLU features of ``H q`` and ``H k``, H any matrix over all heads."""

    def __init__(self, num_heads, head_dim, *, turned: bool = True, **common):
        super().__init__(num_heads, head_dim, **common)
        widths = (num_heads * head_dim, self.num_kv_heads * head_dim)
        self.maps = torch.nn.ParameterList(torch.randn(w, w) for w in widths) if turned else None

    def arguments(self, q, k, v, *, x):
        if self.maps is not None:
            q, k = (self.turn(t, m) for t, m in zip((q, k), self.maps, strict=True))
        return {"q": F.relu(q), "k": F.relu(k), "v": v}

    def turn(self, x, matrix):
        return (x.transpose(1, 2).flatten(2) @ matrix.T).unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def reflection_matrix(self, *, keys=False):
        return self.maps[int(keys)].clone()

    def without_reflection(self):
        common = {"num_kv_heads": self.num_kv_heads, "causal": self.causal, "impl": self.impl}
        return type(self)(self.num_heads, self.head_dim, turned=False, **common)


@pytest.fixture
def turned():
    yield from registered("turned", Turned)


def registered(name, cls):
    register_mechanism(name, paper="", year=2030)(cls)
    yield name
    del registry._REGISTRY[name]


def build(mechanism, **options):
    torch.manual_seed(0)
    layer = Attention(16, 4, mechanism, **options).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def draw():
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES = {
    "plain": {},
    "no bias": {"qkv_bias": False},
    "every part": {"local": "channel", "gate": "silu", "norm": "layer", "rotary": "features", "key_position": (2, 3)},
    "reduced keys": {"spatial_reduction": 2, "key_position": (1, 2)},
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_equal(turned, case):
    layer, x = build(turned, **CASES[case]), draw()
    before = layer(x, spatial_shape=PLANE)
    assert layer.fold() is layer
    assert layer.mechanism.num_parameters == 0
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), before, **TOLERANCE)


def test_grouped_heads(turned):
    layer, x = build(turned, num_kv_heads=2), draw()
    before = layer(x)
    torch.testing.assert_close(layer.fold()(x), before, **TOLERANCE)


@pytest.mark.parametrize("options", [{"reflections": 1}, {"reflections": 2}, {"cross_head": False}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_matrix_of_mirror_is_folded_the_right_way_round(causal, options):
    layer, x = build("mirror", causal=causal, mechanism_options={"modulation": "none"} | options), draw()
    before = layer(x)
    torch.testing.assert_close(layer.fold()(x), before, **TOLERANCE)


def test_what_stands_between_is_named(turned):
    with pytest.raises(ValueError, match="mechanism 'elu' has no reflection that could be folded"):
        build("elu").fold()
    for part, value in {"qk_norm": "rms", "canon": "b", "rotary": 0.5}.items():
        with pytest.raises(ValueError, match=f"{part}={value!r} stands between the projections and the reflection"):
            build(turned, **{part: value}).fold()


def test_a_refused_layer_is_left_as_it_was(turned, monkeypatch):
    layer = build("mirror")
    weight = layer.qkv.weight.clone()
    with pytest.raises(ValueError, match="modulation='sequence' makes the reflection depend on the input"):
        layer.fold()
    assert torch.equal(layer.qkv.weight, weight)
    monkeypatch.delattr(Turned, "without_reflection")
    layer = build(turned)
    weight = layer.qkv.weight.clone()
    with pytest.raises(ValueError, match=r"mechanism 'turned' cannot leave its reflection out"):
        layer.fold()
    assert torch.equal(layer.qkv.weight, weight)
