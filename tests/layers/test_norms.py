"""Norms whose inputs have less precision than their weights, as autocast gives them."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from linattn.layers.norms import create_norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_of_other_precisions_is_rounded_once_and_without_a_word(dtype):
    norm = create_norm("rms", 64)
    with torch.no_grad():
        norm.weight.copy_(0.5 + torch.rand(64, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    exact_x, exact_weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = F.rms_norm(exact_x, (64,), exact_weight, norm.eps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = norm(x)
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps
    assert ((found.double() - exact) / exact).abs().max() <= rounding
    upstream = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found.backward(upstream)
    exact.backward(upstream.double())
    for got, want in ((x.grad, exact_x.grad), (norm.weight.grad, exact_weight.grad)):
        allowed = (torch.finfo(got.dtype).eps / 2 + 64 * torch.finfo(torch.float32).eps) * want.abs().max()
        assert (got.double() - want).abs().max() <= allowed
    assert norm.weight.grad.dtype == torch.float32
