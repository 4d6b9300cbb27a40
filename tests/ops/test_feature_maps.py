"""Feature maps in PyTorch: their formulas, gradients, flows, and what kernels are told of them."""

import pytest
import torch
from torch import Tensor

from linattn import linear_attention, linear_attention_with_state
from linattn.ops.maps import (
    FeatureMap,
    NormPower,
    PairRelu,
    Relu,
    Scaled,
    ShiftedPower,
    SignPower,
    SplitExpm1,
    SplitPower,
    Squares,
    TaylorExp,
    UnitSilu,
)
from linattn.ops.shared.types import LinearState
from ops.map_cases import MAPS, converted, drawer, number, tensors

D = 6


def signs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(min=0), (-x).clamp(min=0)


def heads_of(numbers: Tensor, heads: int) -> Tensor:
    """``(kv heads, F) -> (heads, 1, F)``: what each head of a group is given."""
    return numbers.repeat_interleave(heads // numbers.shape[0], dim=0).unsqueeze(1)


def test_pairs() -> None:
    draw = drawer()
    own, other, x = draw(2, 2, D), draw(2, 2, D), draw(2, 4, 5, D)
    found = PairRelu(own, other)(x)
    for b, h, c in ((0, 0, 0), (0, 1, 1), (1, 2, 4), (1, 3, 5)):
        a, o = own[b, h // 2, c], other[b, h // 2, c]
        torch.testing.assert_close(found[b, h, :, c], (a * x[b, h, :, c] + o * x[b, h, :, c ^ 1]).clamp(min=0))


@pytest.mark.parametrize("opposite", [True, False])
def test_split_power(opposite: bool) -> None:
    draw = drawer()
    power, factor, x = 1 + draw(2, D).abs(), draw(2, D).abs() + 0.1, draw(2, 4, 5, D)
    found = SplitPower(power, factor, opposite=opposite)(x)
    up, down = (part.pow(heads_of(power, 4)) for part in signs(x * heads_of(factor, 4)))
    torch.testing.assert_close(found[:, 0::2], torch.cat([up, down], -1))
    torch.testing.assert_close(found[:, 1::2], torch.cat([down, up] if opposite else [up, down], -1))


@pytest.mark.parametrize("opposite", [True, False])
def test_split_expm1(opposite: bool) -> None:
    draw = drawer()
    same, second, x = draw(2, 2 * D).sigmoid(), draw(2, 2 * D).sigmoid(), 3 * draw(2, 4, 5, D)
    x[0, 0, 0, 0] = 1e4
    found = SplitExpm1(same, second, opposite=opposite)(x)
    up, down = signs(x)
    first = torch.cat([up, down], -1) * heads_of(same, 4)
    other = torch.cat([down, up] if opposite else [up, down], -1) * heads_of(second, 4)
    torch.testing.assert_close(found[:, 0::2], first.clamp(max=32).exp() - 1)
    torch.testing.assert_close(found[:, 1::2], other.clamp(max=32).exp() - 1)


def test_powers_of_directions_and_sizes() -> None:
    x = drawer()(2, 3, 5, D)
    norm = x.norm(dim=-1, keepdim=True)
    exponent = 3 * (0.5 + norm.tanh())
    up, down = signs(x)
    expected = torch.cat([(up / norm).pow(exponent), (down / norm).pow(exponent)], -1)
    torch.testing.assert_close(NormPower(number(3), number(0.5), D)(x), expected)
    torch.testing.assert_close(SignPower(number(3), D)(x), torch.cat([up**3, down**3], -1))


def test_shifted_power() -> None:
    draw = drawer()
    factor, inner, outer, x = draw(2, D).abs(), draw(2, 1, 5).abs(), draw(2, 1, 5).abs(), draw(2, 4, 5, D)
    expected = (inner.unsqueeze(-1) * (x.clamp(min=0) + 1e-6)) ** 2.5 * heads_of(factor, 4) * outer.unsqueeze(-1)
    torch.testing.assert_close(ShiftedPower(2.5, factor, inner, outer)(x), expected)


def test_unit_silu() -> None:
    """Of any size, in one channel or many: positive features of length 1, rounded once."""
    x = drawer()(2, 3, 5, D) * torch.tensor([0.0, 1e-8, 1.0, 30.0, 1e4], dtype=torch.float64).unsqueeze(-1)
    shifted = x / (1 + (-x).exp()) + 0.5
    expected = shifted / shifted.pow(2).sum(-1, keepdim=True) ** 0.5
    found = UnitSilu()(x)
    torch.testing.assert_close(found, expected)
    assert (found > 0).all()
    torch.testing.assert_close(UnitSilu()(x[..., :1]), torch.ones_like(x[..., :1]))
    low = x[:, :, :4].bfloat16()
    assert torch.equal(UnitSilu()(low), UnitSilu()(low.float()).bfloat16())
    assert UnitSilu()(low.half()).dtype == torch.float16


@pytest.mark.parametrize("linear", [None, 0.7])
def test_squares(linear: float | None) -> None:
    x = drawer()(2, 3, 5, D)
    parts = [2 * x**2] if linear is None else [2 * x**2, linear * x]
    found = Squares(number(2), None if linear is None else number(linear), number(1.5), D)(x)
    torch.testing.assert_close(found, torch.cat([*parts, torch.full_like(x[..., :1], 1.5)], -1))


def test_scaled() -> None:
    draw = drawer()
    plain, token, x = SplitPower(1 + draw(1, D).abs(), draw(1, D).abs()), draw(2, 1, 5).abs(), draw(2, 3, 5, D)
    torch.testing.assert_close(Scaled(plain, token)(x), plain(x) * token.unsqueeze(-1))


@pytest.mark.parametrize("name", MAPS)
def test_gradients(name: str) -> None:
    draw = drawer()
    feature_map = converted(MAPS[name](draw, 2, 4, 3), torch.float64)
    x = draw(2, 4, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda *_: feature_map(x), (x, *tensors(feature_map)))


@pytest.mark.parametrize("name", MAPS)
def test_shapes_dtypes_and_twins(name: str) -> None:
    """Widths and flows are as said; the twin's numbers are fp32 and have the shapes that kernels expect."""
    draw = drawer()
    feature_map, x = MAPS[name](draw, 2, 4, 3), draw(2, 4, 3, 4)
    low = converted(feature_map, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        assert low(x.to(dtype)).dtype == dtype
    twin = low.twin()
    assert twin is not None
    assert twin.flows == feature_map.flows
    assert feature_map.num_features(4) == twin.parts * 4 + (twin.constant is not None)
    assert feature_map(x).shape == (2, 4 * twin.flows, 3, feature_map.num_features(4))
    if twin.table is not None:
        assert twin.table.shape[0] in (1, 2)
        assert twin.table.shape[1] in (1, 2 * twin.flows)
        assert twin.table.shape[2:] == (2, 4 * twin.parts)
    if twin.token is not None:
        assert twin.token.shape[1:] == (1, 3)
    for numbers in (twin.table, twin.token, twin.constant):
        assert numbers is None or numbers.dtype == torch.float32


def test_maps_without_a_twin() -> None:
    assert TaylorExp().twin() is None
    assert NormPower(number(3), number(0.5), D, "raw").twin() is None
    assert SignPower(number(3), D, "scaled").twin() is None
    root = ShiftedPower(0.5, torch.ones(1, D), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert root.twin() is None
    assert Scaled(NormPower(number(3), number(0.5), D, "raw"), torch.ones(1, 1, 2)).twin() is None


def two_flow_maps() -> tuple[FeatureMap, FeatureMap]:
    draw = drawer(3)
    same, second = draw(4, 2 * D).sigmoid(), draw(4, 2 * D).sigmoid()
    return SplitExpm1(same, second, opposite=True), SplitExpm1(torch.ones(1, 2 * D, dtype=torch.float64))


@pytest.mark.parametrize("impl", ["reference", "recurrent", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", [None, 1, 3, 4])
def test_flows_are_two_calls(impl: str, causal: bool, decay: int | None) -> None:
    """Each flow attends to its half of the values with its own features; groups of query heads share keys."""
    draw = drawer()
    q, k, v = draw(2, 4, 9, D), draw(2, 2, 9, D), draw(2, 2, 9, 8)
    shapes = {1: (2,), 3: (2, 2, 9), 4: (2, 2, 9, 2 * D)}
    log_decay = None if decay is None else -draw(*shapes[decay]).abs()
    maps = two_flow_maps()
    found = linear_attention(q, k, v, feature_map=maps, causal=causal, log_decay=log_decay, impl=impl)
    phi, psi = maps[0](q), maps[1](k)
    halves = [
        linear_attention(phi[:, f::2], psi[:, f::2], half, causal=causal, log_decay=log_decay)
        for f, half in enumerate(v.chunk(2, dim=-1))
    ]
    torch.testing.assert_close(found, torch.cat(halves, dim=-1))


def test_bad_flows() -> None:
    q, v = torch.rand(1, 2, 3, D, dtype=torch.float64), torch.rand(1, 2, 3, 7, dtype=torch.float64)
    split = SplitExpm1(torch.ones(1, 2 * D, dtype=torch.float64))
    with pytest.raises(ValueError, match="2 flows, v 7 channels"):
        linear_attention(q, q, v, feature_map=split)
    with pytest.raises(ValueError, match="q 2 flows and k 1"):
        linear_attention(q, q, q, feature_map=(split, Relu()))
    with pytest.raises(ValueError, match="norm_features serve one flow"):
        linear_attention(q, q, q, feature_map=split, norm_features=(q, q))
    state = LinearState(torch.zeros(1, 2, 2 * D, D), torch.zeros(1, 2, 2 * D))
    with pytest.raises(ValueError, match=r"initial_state\.kv"):
        linear_attention_with_state(q, q, q, feature_map=split, initial_state=state)
