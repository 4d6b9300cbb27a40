"""Feature maps by kernels against the same maps of PyTorch in fp64: features and every gradient."""

import pytest
import torch
from torch import Tensor

from kernels.budget import moved
from kernels.device import DEVICE
from linattn.kernels.common.support import MAP_CODES
from linattn.kernels.maps.apply import STEEP, map_features
from linattn.kernels.maps.library import LEARNS
from linattn.ops.maps import FeatureMap, PairRelu, SplitPower
from linattn.testing.poison import poisoned_allocations
from ops.map_cases import MAPS, converted, drawer, tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def run(feature_map: FeatureMap, x: Tensor, seed: Tensor, kernel: bool) -> list[Tensor]:
    """Features, then the gradients of x and of all that the map holds."""
    x = x.detach().requires_grad_()
    if kernel:
        twin = feature_map.twin()
        assert twin is not None
        out = map_features(x, twin)
    else:
        out = feature_map(x)
    leaves = [x, *tensors(feature_map)]
    return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def compare(exact: FeatureMap, x: Tensor, dtype: torch.dtype) -> None:
    """The kernel errs no more than twice what PyTorch does in that dtype and what rounds the largest number."""
    x = x.to(dtype)
    low = converted(exact, torch.float32, DEVICE)
    # What fp32 numbers hold is what both are given.
    exact = converted(converted(exact, torch.float32), torch.float64)
    shape = exact(x.double()).shape
    seed = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    expected = run(exact, x.double(), seed.double(), kernel=False)
    plain = run(low, x.to(DEVICE), seed.to(DEVICE), kernel=False)
    nudged = run(exact, moved(x), seed.double(), kernel=False)
    with poisoned_allocations():
        found = run(low, x.to(DEVICE), seed.to(DEVICE), kernel=True)
    assert found[0].is_contiguous()
    assert found[0].dtype == found[1].dtype == dtype
    for i, (kernel, torch_, other, true) in enumerate(zip(found, plain, nudged, expected, strict=True)):
        assert kernel.shape == true.shape
        # What rounding does to the features is one thing, to the gradients of shared fp32 numbers another.
        eps = torch.finfo(kernel.dtype).eps
        # Powers are by exponentials and logarithms of the hardware: a few more roundings of fp32.
        own = 16 * torch.finfo(torch.float32).eps
        cost = torch.maximum((torch_.cpu().double() - true).abs().max(), (other - true).abs().max())
        budget = 2 * (cost + (eps + own) * true.abs().max())
        error = (kernel.cpu().double() - true).abs().max()
        assert error <= budget, (i, float(error), float(budget))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Two kv heads for four query heads, more tokens than a tile has, padded rows in the last one."""
    draw = drawer()
    T = 70 if dtype == torch.float32 else 10
    compare(MAPS[name](draw, 2, 16, T), 1.5 * draw(2, 4, T, 16), dtype)


@pytest.mark.parametrize("name", MAPS)
def test_any_width_and_strides(name: str) -> None:
    D = 6 if name.startswith("pair") else 5
    draw = drawer(D)
    x = draw(2, D, 7, 3).permute(0, 3, 2, 1)
    compare(MAPS[name](draw, 3, D, 7), x, torch.float32)
    assert not x.is_contiguous()


@pytest.mark.parametrize("name", MAPS)
def test_zero_vectors_and_extreme_ones(name: str) -> None:
    """Zeros, one channel alone, tiny and large vectors: everything stays finite, and right."""
    draw = drawer(7)
    x = draw(2, 2, 8, 16)
    x[:, :, 0] = 0
    x[:, :, 1, 1:] = 0
    x[:, :, 2] *= 1e-18
    x[:, :, 3, ::2] = 0
    compare(MAPS[name](draw, 2, 16, 8), x, torch.float32)
    large = 1e3 if name in ("shifted_power", "split_power", "split_power_opposite") else 1e4
    feature_map = converted(MAPS[name](draw, 2, 16, 8), torch.float32, DEVICE)
    twin = feature_map.twin()
    assert twin is not None
    sizes = torch.tensor([large, 1e-30, 0.0, large, 1e-38, 1.0, 1e-6, large])
    extreme = (sizes[:, None] * draw(2, 2, 8, 16)).float().to(DEVICE).requires_grad_()
    out = map_features(extreme, twin)
    found = [out, *torch.autograd.grad(out.sum(), [extreme, *tensors(feature_map)])]
    assert all(tensor.isfinite().all() for tensor in found)


def test_a_power_has_no_gradient_at_zero() -> None:
    feature_map = SplitPower(torch.full((1, 4), 1.5), torch.ones(1, 4))
    feature_map = converted(feature_map, torch.float32, DEVICE)
    x = torch.zeros(1, 1, 3, 4, device=DEVICE)
    twin = feature_map.twin()
    assert twin is not None
    shape = map_features(x, twin).shape
    for found in run(feature_map, x, torch.ones(shape, device=DEVICE), kernel=True):
        assert not found.any()


def test_half_precision_keeps_the_range_of_steep_maps() -> None:
    x = torch.full((1, 1, 2, 16), 300.0, dtype=torch.float16, device=DEVICE)
    draw = drawer()
    for name in ("squares", "sign_power", "split_power"):
        feature_map = converted(MAPS[name](draw, 1, 16, 2), torch.float32, DEVICE)
        twin = feature_map.twin()
        assert twin is not None
        out = map_features(x, twin)
        assert out.dtype == feature_map(x).dtype == torch.float32
        torch.testing.assert_close(out, feature_map(x), rtol=1e-4, atol=1e-4)
    turned = converted(PairRelu(draw(1, 1, 16), draw(1, 1, 16)), torch.float32, DEVICE).twin()
    assert turned is not None
    assert map_features(x, turned).dtype == torch.float16


def test_nothing_to_map() -> None:
    x = torch.zeros(2, 3, 0, 8, device=DEVICE, requires_grad=True)
    feature_map = converted(MAPS["squares"](drawer(), 3, 8, 0), torch.float32, DEVICE)
    twin = feature_map.twin()
    assert twin is not None
    out = map_features(x, twin)
    assert out.shape == (2, 3, 0, 9)
    leaves = [x, *tensors(feature_map)]
    for grad, like in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert grad.shape == like.shape
        assert not grad.any()


def test_the_lists_of_names_agree_with_the_device_code() -> None:
    from linattn.kernels.maps.device.codes import learns_table, parts_of

    for name, code in MAP_CODES.items():
        assert bool(learns_table(code)) == (code in LEARNS), name
    seen = {}
    for case in MAPS.values():
        twin = converted(case(drawer(), 2, 4, 5), torch.float32).twin()
        assert twin is not None
        assert parts_of(MAP_CODES[twin.name]) == twin.parts
        seen[twin.name] = case(drawer(), 2, 4, 5)
    assert set(seen) == set(MAP_CODES) - {"identity"}
    for name, feature_map in seen.items():
        assert getattr(feature_map, "steep", False) == (name in STEEP), name


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 72, 128])
@pytest.mark.parametrize("name", MAPS)
def test_large(name: str, D: int, dtype: torch.dtype) -> None:
    draw = drawer()
    compare(MAPS[name](draw, 2, D, 1030), draw(2, 4, 1030, D), dtype)
