"""ZeroS in bf16 against fp64: logits that are nearly equal leave little of what its kernels sum.

Without a GPU their products are emulated: operands lose the 13 bits that a tensor core does not read.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import cut
from kernels.device import DEVICE
from linattn import create_mechanism
from linattn.mechanisms import zeros
from linattn.ops.linear.call import LinearCall
from linattn.ops.shared.types import AttentionOutput, LinearState

CHUNK = 32


class Product(torch.autograd.Function):
    """Of cut operands, forward and backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return cut(a) @ cut(b)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (cut(x) for x in ctx.saved_tensors)
        return cut(d) @ b.mT, a.mT @ cut(d)


def emulated(call: LinearCall, impl: str) -> AttentionOutput:
    """Causal, without a normaliser, masks and states: as the kernels walk, chunk by chunk."""
    product: Any = Product.apply
    (q, k, v), (B, H, T, K) = (call.q, call.k, call.v), call.k.shape
    assert q.shape == k.shape
    a = q.new_zeros(B, H, T) if call.log_decay is None else call.log_decay.float()
    v = v if call.log_input is None else v * call.log_input.float().exp().unsqueeze(-1)
    state, found = q.new_zeros(B, H, K, v.shape[3]), []
    for start in range(0, T, CHUNK):
        part = slice(start, start + CHUNK)
        f = a[:, :, part].cumsum(-1)
        gap = (f.unsqueeze(-1) - f.unsqueeze(-2)).clamp(max=0).exp().tril()
        weights = product(q[:, :, part], k[:, :, part].mT) * gap
        before = product(q[:, :, part], state) * f.exp().unsqueeze(-1)
        found.append(before + product(weights, v[:, :, part]))
        kept = (f[..., -1:] - f).exp().unsqueeze(-1)
        state = state * f[..., -1:, None].exp() + product((k[:, :, part] * kept).mT, v[:, :, part])
    return AttentionOutput(torch.cat(found, dim=2), LinearState(state, state[..., 0]))


def run(built: torch.nn.Module, inputs: list[Tensor], d_out: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    mechanism = copy.deepcopy(built).to(dtype)
    q, k, v, x = [t.to(dtype).detach().requires_grad_() for t in inputs]
    output = mechanism(q, k, v, x=x)
    wanted = {"dq": q, "dk": k, "dv": v, "dx": x, **dict(mechanism.named_parameters())}
    grads = torch.autograd.grad(output, list(wanted.values()), d_out.to(dtype))
    found = {"output": output.detach().double(), **{n: g.double() for n, g in zip(wanted, grads, strict=True)}}
    for name in ("u_map", "gate_map"):  # a bias is the weight of an input of 1: alone, two numbers that may cancel
        weight, bias = (found.pop(f"{name}.{part}") for part in ("weight", "bias"))
        found[name] = torch.cat([weight, bias.unsqueeze(1)], dim=1)
    return found


def set_logit(token: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = zeros.Zeros.logits

    def with_outlier(self, *given: Tensor) -> Tensor:
        z = logits(self, *given).clone()
        z[:, :, token] = value
        return z

    monkeypatch.setattr(zeros.Zeros, "logits", with_outlier)


def take_tf32(built: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls ask for it."""
    if DEVICE == "cuda":
        built.impl = "triton"
        return
    real = zeros.run
    monkeypatch.setattr(zeros, "run", lambda call, impl: (emulated if call.tf32 else real)(call, impl))


@pytest.mark.parametrize(("T", "D", "outlier", "spread"), [
    (512, 64, None, 0.02), (200, 128, None, 0.02), (4096, 16, None, 0.02), (200, 64, None, 0.3),
    (200, 64, 30.0, 0.02), (200, 128, 120.0, 0.02), (512, 64, 120.0, 0.02),
])  # fmt: skip
def test_within_the_budget(T: int, D: int, outlier: float | None, spread: float, monkeypatch) -> None:
    """spread: of the map of the logits, 0.02 at the start of training. outlier: one logit among the last ones."""
    torch.manual_seed(0)
    built = create_mechanism("zeros", num_heads=1, head_dim=D, causal=True, impl="chunked").to(torch.bfloat16)
    torch.nn.init.normal_(built.u_map.weight, std=spread)
    inputs = [torch.randn(shape).bfloat16().to(DEVICE) for shape in [(1, 1, T, D)] * 3 + [(1, T, D)]]
    d_out = torch.randn(1, 1, T, D).bfloat16().to(DEVICE)
    built = built.to(DEVICE)
    if outlier is not None:
        set_logit(-T // 8, outlier, monkeypatch)
    exact = run(built, inputs, d_out, torch.float64)
    plain = run(built, inputs, d_out, torch.bfloat16)
    take_tf32(built, monkeypatch)
    found = run(built, inputs, d_out, torch.bfloat16)
    if DEVICE == "cpu":
        assert not torch.equal(found["output"], plain["output"])  # the products were cut
    for name, want in exact.items():
        cost, error = ((x[name] - want).abs().max() for x in (plain, found))
        # One number is a sum over all tokens that may cancel.
        budget = (4 if want.numel() == 1 else 2) * (cost + torch.finfo(torch.bfloat16).eps * want.abs().max())
        assert error <= budget, f"{name}: error {error:.3g}, allowed {budget:.3g}"


@pytest.mark.parametrize("value", [3.0, 120.0, -120.0])
def test_a_late_outlier_does_not_move_the_past(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a digit: what sums are centred by, only tokens say that come before what they are for."""
    torch.manual_seed(0)
    built = create_mechanism("zeros", num_heads=1, head_dim=64, causal=True, impl="chunked").to(DEVICE, torch.bfloat16)
    q, k, v = (torch.randn(1, 1, 200, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    x = torch.randn(1, 200, 64, device=DEVICE, dtype=torch.bfloat16)
    take_tf32(built, monkeypatch)
    before = built(q, k, v, x=x)
    for token in (1, 2, 31, 150):
        with monkeypatch.context() as patch:
            set_logit(token, value, patch)
            after = built(q, k, v, x=x)
        assert torch.equal(after[:, :, :token], before[:, :, :token])
        assert not torch.equal(after[:, :, token:], before[:, :, token:])
