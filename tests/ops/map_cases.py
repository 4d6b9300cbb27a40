"""Every feature map that has a twin, with drawn numbers: what the tests of the maps and of their kernels go over."""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from linattn.ops.maps import (
    EluPlusOne,
    FeatureMap,
    NormPower,
    PairRelu,
    Relu,
    Scaled,
    ShiftedPower,
    SignPower,
    SoftmaxPair,
    SplitExpm1,
    SplitPower,
    Squares,
    UnitSilu,
)

Draw = Callable[..., Tensor]
# (draw, heads, head_dim, T) -> a map in fp64, whose tensors may be shared by groups of heads.
MAPS: dict[str, Callable[[Draw, int, int, int], FeatureMap]] = {
    "relu": lambda draw, heads, D, T: Relu(),
    "elu": lambda draw, heads, D, T: EluPlusOne(),
    "softmax_pair": lambda draw, heads, D, T: SoftmaxPair(),
    "unit_silu": lambda draw, heads, D, T: UnitSilu(),
    "pair_relu": lambda draw, heads, D, T: PairRelu(draw(2, heads, D), draw(2, heads, D)),
    "pair_relu_one": lambda draw, heads, D, T: PairRelu(draw(1, 1, D), draw(1, 1, D)),
    "split_power": lambda draw, heads, D, T: SplitPower(1 + draw(heads, D).abs(), 0.5 + draw(heads, D).abs()),
    "split_power_opposite": lambda draw, heads, D, T: SplitPower(
        1 + draw(heads, D).abs(), 0.5 + draw(heads, D).abs(), opposite=True
    ),
    "norm_power": lambda draw, heads, D, T: NormPower(number(3.0), number(0.5), D),
    "norm_root": lambda draw, heads, D, T: NormPower(number(0.6), number(0.1), D),
    "sign_power": lambda draw, heads, D, T: SignPower(number(3.0), D),
    "split_expm1": lambda draw, heads, D, T: SplitExpm1(draw(heads, 2 * D).sigmoid()),
    "split_expm1_one": lambda draw, heads, D, T: SplitExpm1(torch.ones(1, 2 * D, dtype=torch.float64)),
    "split_expm1_opposite": lambda draw, heads, D, T: SplitExpm1(
        draw(heads, 2 * D).sigmoid(), draw(heads, 2 * D).sigmoid(), opposite=True
    ),
    "squares": lambda draw, heads, D, T: Squares(draw(), None, draw(), D),
    "squares_and_linear": lambda draw, heads, D, T: Squares(draw(), draw(), draw(), D),
    "shifted_power": lambda draw, heads, D, T: ShiftedPower(
        2.5, draw(heads, D).abs(), 0.5 + draw(2, 1, T).abs(), 0.5 + draw(2, 1, T).abs()
    ),
    "scaled": lambda draw, heads, D, T: Scaled(NormPower(number(2.0), number(0.5), D), 1 + draw(2, 1, T).abs()),
    "scaled_unit": lambda draw, heads, D, T: Scaled(UnitSilu(), 1 + draw(2, 1, T).abs()),
    "scaled_flows": lambda draw, heads, D, T: Scaled(
        SplitExpm1(draw(heads, 2 * D).sigmoid(), draw(heads, 2 * D).sigmoid(), opposite=True), 1 + draw(1, 1, T).abs()
    ),
}


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def drawer(seed: int = 0) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def is_learned(feature_map: FeatureMap, name: str) -> bool:
    return not (isinstance(feature_map, NormPower | SignPower) and name in ("power", "tau"))


def tensors(feature_map: FeatureMap) -> list[Tensor]:
    """The learned tensors that a map holds, those of a map inside it first."""
    found: list[Tensor] = []
    for field in fields(feature_map):  # type: ignore[arg-type]
        value = getattr(feature_map, field.name)
        if isinstance(value, FeatureMap):
            found += tensors(value)
        elif isinstance(value, Tensor) and is_learned(feature_map, field.name):
            found.append(value)
    return found


def converted(feature_map: FeatureMap, dtype: torch.dtype, device: str = "cpu") -> FeatureMap:
    """The same map with leaf tensors of a dtype that require a gradient."""
    new: dict[str, object] = {}
    for field in fields(feature_map):  # type: ignore[arg-type]
        value = getattr(feature_map, field.name)
        if isinstance(value, FeatureMap):
            new[field.name] = converted(value, dtype, device)
        elif isinstance(value, Tensor):
            leaf = value.detach().to(device=device, dtype=dtype).clone()
            new[field.name] = leaf.requires_grad_(is_learned(feature_map, field.name))
    return replace(feature_map, **new)  # type: ignore[type-var]
