"""What an error may be, from the data: twice what plain PyTorch in the same precision errs, or a few roundings do."""

from collections.abc import Mapping

import torch
from torch import Tensor

# On the way of one number through a kernel: an exponential, a product, a sum, a division, each good to a bit or two.
ROUNDINGS = 4 * torch.finfo(torch.float32).eps


def moved(x: Tensor, seed: int = 3) -> Tensor:
    """``x`` in fp64, each number moved by a few roundings of fp32."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.double() * (1 + ROUNDINGS * noise.to(x.device))


def error(found: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    difference = (found.detach().double() - exact.detach().double()).abs().max().item()
    return difference if difference == difference else float("inf")


def assert_within(
    found: dict[str, Tensor], exact: dict[str, Tensor], *plain: dict[str, Tensor], summed: float = 1.0,
    inputs: torch.dtype = torch.float32, rests: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """``err(found) <= 2 (err(plain) + eps max(abs(exact)))`` for every tensor, errors against fp64, of the worst plain.

    ``summed``: a factor for the gradient of a decay, which is a sum along the sequence. ``inputs``: their dtype; a
    state in fp32 has been made of features rounded to it. ``rests``: what rounding leaves of terms that cancel.
    """
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert found[name].shape == value.shape, name
        cost = max((rests or {}).get(name, 0.0), *(error(other[name], value) for other in plain))
        size = value.abs().max().item() if value.numel() else 0.0
        eps = max(torch.finfo(found[name].dtype).eps, torch.finfo(inputs).eps)
        allowed = 2 * (cost + eps * size) * (summed if "log_decay" in name else 1.0)
        assert error(found[name], value) <= allowed, (name, error(found[name], value), allowed)
