"""Operators by a shorter way: the same numbers and gradients, whatever part of the outputs a loss uses."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.device import DEVICE
from linattn.kernels.causal.library import causal_directly, triton_causal
from linattn.kernels.common.direct import is_traced
from linattn.kernels.exponential.library import exponential_directly, triton_exponential

T, D = 24, 16


@pytest.fixture(scope="module")
def leaves() -> list[Tensor]:
    """q, k, v, two gates, and a state: sums of values and of keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, T, D)] * 3 + [(1, 2, T)] * 2 + [(1, 2, D, D), (1, 2, D)]
    found = [torch.rand(shape, generator=generator).to(DEVICE) for shape in shapes]
    return [(x - 1 if x.ndim == 3 and n < 5 else x).requires_grad_() for n, x in enumerate(found)]


def causal(run, leaves: list[Tensor]):
    q, k, v, a, _, kv, z = leaves
    out, _, *state = run(q, k, v, kv, z, a, None, None, False, 1, 1e-6, torch.float32, True, False, None, False)
    return out, *state


def exponential(run, leaves: list[Tensor]):
    q, k, v, i, f, kv, z = leaves
    unit = torch.zeros(1, 2, dtype=torch.float64, device=DEVICE)
    out, *state, _, _, _, _, _ = run(q, k, v, i, f, kv, z, unit, None, 1.0, torch.float32, True)
    return out, *state


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("call", "direct", "operator"),
    [(causal, causal_directly, triton_causal), (exponential, exponential_directly, triton_exponential)],
    ids=["causal", "exponential"],
)
def test_outputs_that_no_loss_uses_count_as_zeros(call, direct, operator, used, leaves) -> None:
    """Gradients are not made of zeros where there are none: those of the whole, weighed by 0, say what is right."""
    found = call(direct, leaves)
    grads = torch.autograd.grad([found[n].square().sum() for n in used], leaves, allow_unused=True)
    expected = call(operator, leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    losses = [x.square().sum() * (n in used) for n, x in enumerate(expected)]
    for n, (grad, other) in enumerate(zip(grads, torch.autograd.grad(losses, leaves, allow_unused=True), strict=True)):
        if other is None:
            assert grad is None, n
        else:
            # Without a gradient to read, kernels are others, and may sum in another order.
            error = other if grad is None else grad - other
            assert error.abs().max() <= 1e-5 * other.abs().max(), n
    with torch.no_grad():
        assert torch.equal(call(direct, leaves)[0], found[0])


def test_who_watches_sees_the_operator(leaves: list[Tensor]) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **kwargs or {})

    seen: set[str] = set()
    with Watch():
        torch.autograd.grad(causal(causal_directly, leaves)[0].sum(), leaves[:3])
    assert {"linattn.triton_causal.default", "linattn.triton_causal_backward.default"} <= seen
    assert not is_traced((leaves[0], None, 1, True, 0.5, torch.float32, torch.nn.Parameter(leaves[1].detach())))
    assert is_traced((leaves[0].detach().as_subclass(type("Own", (Tensor,), {})), None))
    assert torch.func.vmap(lambda x: x * float(is_traced((leaves[0],))))(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_second_derivative_is_refused(leaves: list[Tensor]) -> None:
    """Rather than taken for 0, as that of a constant."""
    q, v = leaves[0], leaves[2]
    (grad,) = torch.autograd.grad(causal(causal_directly, leaves)[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gradients of kernels cannot be .*impl='reference'"):
        torch.autograd.grad((grad.square() + q).sum(), v)
