"""Attention with turned features: inputs, and its output and gradients by kernels and in plain PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.budget import moved
from kernels.device import DEVICE
from linattn import linear_attention
from linattn.layers.rotary import PlaneRotation, plane_rotation
from linattn.ops.maps import FeatureMap
from ops.map_cases import MAPS, converted, drawer, tensors

# Names of the maps of queries and keys; None: the inputs are the features.
PAIRS = {
    "none": (None, None), "relu": ("relu", "relu"), "elu": ("elu", "elu"), "mirror": ("pair_relu", "pair_relu"),
    "nala": ("norm_power", "sign_power"), "nala_masked": ("scaled", "sign_power"), "hedgehog": ("softmax_pair",) * 2,
    "pola": ("split_power_opposite", "split_power"), "pola_plus": ("split_expm1_opposite", "split_expm1_one"),
    "pola_plus_masked": ("scaled_flows", "split_expm1"), "focused": ("shifted_power", "shifted_power"),
    "lion": ("unit_silu", "unit_silu"),
}  # fmt: skip


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    maps: tuple[FeatureMap | None, FeatureMap | None]
    rotation: PlaneRotation
    key_mask: Tensor | None

    @property
    def leaves(self) -> dict[str, Tensor]:
        found = {"q": self.q, "k": self.k, "v": self.v}
        for side, own in zip("qk", self.maps, strict=True):
            found |= {f"map {side} {i}": x for i, x in enumerate([] if own is None else tensors(own))}
        return found

    def in_dtype(self, dtype: torch.dtype, *, nudge: int | None = None) -> "Case":
        """With leaves of their own: inputs of the dtype, the maps' numbers in fp32 or fp64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        inputs = (x if nudge is None else moved(x, nudge) for x in (self.q, self.k, self.v))
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
        map_q, map_k = (None if own is None else converted(own, wide, DEVICE) for own in self.maps)
        return Case(q, k, v, (map_q, map_k), self.rotation, self.key_mask)


def draw(
    name: str, *, dtype: torch.dtype = torch.float32, B: int = 2, H: int = 2, H_kv: int = 2, D: int = 16,
    plane: tuple[int, int] = (5, 7), prefix: int = 0, blocks: bool = True, mask: bool = False, stride: int = 1,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Queries lie as a projection leaves them; masked keys and values hold NaN."""
    normal = drawer(seed)
    keys = tuple(-(-n // stride) for n in plane)
    Tq, Tk = (shape[0] * shape[1] + prefix for shape in (plane, keys))
    q, k, v = normal(B, Tq, H, D).transpose(1, 2), normal(B, H_kv, Tk, D), normal(B, H_kv, Tk, D) + 0.5
    maps = [
        None if own is None else MAPS[own](normal, H_kv, D, T) for own, T in zip(PAIRS[name], (Tq, Tk), strict=True)
    ]
    if name == "none":
        q, k = q.abs(), k.abs()
    key_mask = None
    if mask:
        key_mask = normal(B, Tk) < 0.5
        k, v = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (k, v))
        key_mask = key_mask.to(DEVICE)
    map_q, map_k = (None if own is None else converted(own, torch.float32, DEVICE) for own in maps)
    rotation = plane_rotation(
        plane, width=D if blocks else None, num_prefix_tokens=prefix, key_shape=(keys[0], keys[1]), stride=stride
    )
    # What the dtype holds is what all are given.
    q, k, v = (x.to(dtype).to(DEVICE) for x in (q, k, v))
    return Case(q, k, v, (map_q, map_k), rotation, key_mask)


def evaluate(case: Case, impl: str) -> dict[str, Tensor]:
    """The output, and the gradients of all leaves."""
    maps = None if case.maps[0] is None else case.maps
    out = linear_attention(
        case.q, case.k, case.v, feature_map=maps, rotate=case.rotation, key_mask=case.key_mask, impl=impl,  # type: ignore[arg-type]
        eps=1e-6 * case.k.shape[2],
    )  # fmt: skip
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = case.leaves
    grads = torch.autograd.grad(out, list(leaves.values()), seed.to(torch.bfloat16).to(out.device, out.dtype))
    return {"output": out.detach()} | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
