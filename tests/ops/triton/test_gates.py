"""The running maximum of exponential gates on a Triton kernel, against the stabilizer in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.stabilizer import Stabilized, stabilize
from linattn.ops.triton import gates
from linattn.ops.triton.gates import stabilize_gates, triton_gates
from linattn.testing.poison import poisoned_allocations
from ops.triton.device import DEVICE


def draw(T: int, kind: str = "usual", B: int = 2, H: int = 3) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(T)
    i, f = (torch.randn(B, H, T, generator=gen, dtype=torch.float64) for _ in range(2))
    if kind == "large":
        i, f = 300 * i, -200 * f.abs()
    else:
        f = F.logsigmoid(f + 2)
    if kind == "closed":
        f = torch.where(torch.rand(f.shape, generator=gen) > 0.7, -torch.inf, f)
        i = torch.where(torch.rand(i.shape, generator=gen) > 0.5, -torch.inf, i)
    return i.to(DEVICE), f.to(DEVICE)


def compare(found: Stabilized, want: Stabilized) -> None:
    for name, x in want._asdict().items():
        got = getattr(found, name)
        assert got.shape == x.shape
        # What fp32 keeps of a decay and of a gain; the maximum is fp64 throughout.
        eps = 1e-13 if got.dtype == torch.float64 else torch.finfo(torch.float32).eps
        assert torch.equal(got == -torch.inf, x == -torch.inf), name
        error = (got.double() - x).masked_fill(x == -torch.inf, 0).abs()
        assert (error <= eps * (1 + x.masked_fill(x == -torch.inf, 0).abs())).all(), name


@pytest.mark.parametrize("kind", ["usual", "large", "closed"])
@pytest.mark.parametrize("T", [1, 16, 77])
@pytest.mark.parametrize("start", [False, True])
def test_equals_the_stabilizer(T: int, kind: str, start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_LONGEST_BLOCK", 32)
    i, f = draw(T, kind)
    m = torch.linspace(-5, 5, 6, dtype=torch.float64, device=DEVICE).view(2, 3) if start else None
    compare(stabilize_gates(i, f, m), stabilize(i, f, m))


def test_packed_sequences_and_strides() -> None:
    i, f = (x[:1] for x in draw(40))
    i = i.transpose(1, 2).contiguous().transpose(1, 2)
    cu = torch.tensor([0, 7, 7, 40], device=DEVICE)
    m = torch.tensor([[0.5, -torch.inf, 3], [1, 2, 3], [-4, 0, 40]], dtype=torch.float64, device=DEVICE)
    compare(stabilize_gates(i, f, m, cu), stabilize(i, f, m, cu))


def test_gradients_are_those_of_the_stabilizer() -> None:
    i, f = draw(30, "closed")
    m = torch.full((2, 3), 1.5, dtype=torch.float64, device=DEVICE)
    weights = [torch.randn(2, 3, 30, dtype=torch.float64).to(DEVICE) for _ in range(2)]
    # Where nothing came yet nothing decays, and whoever uses that decay has a gradient of 0 for it.
    weights[0].masked_fill_(F.pad(stabilize(i, f, m).log_scale, (1, 0))[..., :-1] == -torch.inf, 0)
    grads = []
    for function in (stabilize_gates, stabilize):
        leaves = [x.clone().requires_grad_() for x in (i, f, m)]
        found = function(*leaves)
        loss = sum((x.double() * w).sum() for x, w in zip(found[:2], weights, strict=True))
        grads.append(torch.autograd.grad(loss, leaves))
    for x, want in zip(*grads, strict=True):
        torch.testing.assert_close(x, want.float().double(), rtol=1e-6, atol=1e-6)


def test_fresh_memory_is_never_read_and_runs_are_equal() -> None:
    i, f = draw(50)
    with poisoned_allocations():
        first = stabilize_gates(i, f)
    for x, y in zip(first, stabilize_gates(i, f), strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)


def test_operator_is_registered_well() -> None:
    i, f = (x.requires_grad_() for x in draw(20))
    start = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.library.opcheck(
        triton_gates, (i, f, start, None), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize("kind", ["usual", "large", "closed"])
def test_long_sequences(kind: str) -> None:
    i, f = draw(5000, kind)
    compare(stabilize_gates(i, f), stabilize(i, f))
