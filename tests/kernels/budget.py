"""How kernels are held against a definition in fp64: results and gradients of a call, and what an error may be.

The budget comes from the data: twice what plain PyTorch in the same precision errs, or a few roundings do.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from linattn.testing.cases import random_like
from linattn.testing.poison import poisoned_allocations

Tensors = dict[str, Tensor]
Call = Callable[[Tensors, str], Tensors]  # tensors that get gradients, and the form, to results

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# On the way of one number through a kernel: an exponential, a product, a sum, a division, each good to a bit or two.
ROUNDINGS = 4 * torch.finfo(torch.float32).eps


def moved(x: Tensor, seed: int = 3) -> Tensor:
    """``x`` in fp64, each number moved by a few roundings of fp32."""
    return x.double() * (1 + ROUNDINGS * random_like(x.double(), seed))


def cut(x: Tensor) -> Tensor:
    """fp32 as a tensor core reads it: the last 13 bits are dropped."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def error(found: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    difference = (found.detach().double() - exact.detach().double()).abs().max().item()
    return difference if difference == difference else float("inf")


def assert_within(
    found: Tensors, exact: Tensors, *plain: Tensors, summed: float = 1.0, inputs: torch.dtype = FP32,
    rests: Mapping[str, float] | None = None,
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


def evaluate(call: Call, tensors: Tensors, impl: str, dtype: torch.dtype = FP32, same_sign: bool = False) -> Tensors:
    """Results, and the gradients of all tensors for fixed weights of the results, which ``dtype`` holds exactly."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    results = call(leaves, impl)
    loss = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        weight = random_like(x.double()).to(dtype).double()
        loss = loss + (x.double() * (weight.abs() if same_sign else weight)).sum().cpu()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
    found = {name: x.detach() for name, x in results.items()}
    return found | {f"d {name}": x for name, x in zip(leaves, gradients, strict=True)}


def check(
    call: Call, tensors: Tensors, *, dtype: torch.dtype = FP32, spec: str = "reference", form: str = "chunked",
    rests: Callable[[Tensors, list[Tensors]], Mapping[str, float]] = lambda exact, plain: {}, same_sign: bool = False,
    summed: float = 1.0,
) -> Tensors:  # fmt: skip
    """Hold ``impl="triton"`` against ``spec`` in fp64, in memory that is NaN before it is written; what it found.

    Plain PyTorch is ``spec`` and ``form`` in the dtypes given, and with fp32, where kernels and PyTorch err by the
    order of their sums alone, ``spec`` on inputs moved by a few roundings.
    """
    exact = evaluate(call, {name: x.double() for name, x in tensors.items()}, spec, dtype, same_sign)
    plain = [evaluate(call, tensors, impl, dtype, same_sign) for impl in dict.fromkeys((spec, form))]
    for seed in (3, 4) if dtype == FP32 else ():
        other = {name: moved(x, seed) for name, x in tensors.items()}
        plain.append(evaluate(call, other, spec, dtype, same_sign))
    with poisoned_allocations():
        found = evaluate(call, tensors, "triton", dtype, same_sign)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in plain[0].items()}
    assert_within(found, exact, *plain, summed=summed, inputs=dtype, rests=rests(exact, plain))
    return found


def assert_repeats(call: Call, tensors: Tensors, dtype: torch.dtype = FP32) -> None:
    """No memory is read that nobody wrote, and runs have the same bits."""
    first = evaluate(call, tensors, "triton", dtype)
    with poisoned_allocations():
        second = evaluate(call, tensors, "triton", dtype)
    for name, x in first.items():
        assert x.isfinite().all(), name
        assert torch.equal(x, second[name]), name
