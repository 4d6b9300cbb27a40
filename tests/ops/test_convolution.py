"""The short convolution: torch's own depthwise convolution, windows of any width, wrong calls."""

import pytest
import torch
import torch.nn.functional as F

from linattn import short_convolution, short_convolution_step, short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState
from ops import convolution_cases
from ops.convolution_cases import F64, FORMS, make
from ops.test_ops_with_state import assert_same, results, some_mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8, 11])
@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("masked", [True, False])
def test_forms_agree_for_every_width(form, W, T, masked):
    inputs, mask = make(T, W=W), some_mask(T) if masked else None
    assert_same(
        results(convolution_cases, inputs, impl=form, key_mask=mask),
        results(convolution_cases, inputs, impl="reference", key_mask=mask),
    )


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("T", [1, 3, 50])
def test_it_is_the_depthwise_convolution_of_torch(form, T):
    tensors = {n: x.requires_grad_() for n, x in make(T, state=False).items()}
    x, weight, bias = tensors.values()
    padded = F.pad(x.transpose(1, 2), (3, 0))
    expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=3)).transpose(1, 2) + x
    found = short_convolution(x, weight, bias, residual=True, activation="silu", impl=form)
    direction = torch.randn(expected.shape, dtype=F64)
    gradients = [torch.autograd.grad((y * direction).sum(), list(tensors.values())) for y in (found, expected)]
    assert_same([found, *gradients[0]], [expected, *gradients[1]], 1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x must be a tensor \(B, T, C\), got list"),
        ({"x": torch.zeros(4, 3)}, ValueError, r"x must be \(B, T, C\), got shape \(4, 3\)"),
        ({"weight": torch.zeros(3, 1, 4, dtype=F64)}, ValueError, r"weight must be \(C, W\), got shape \(3, 1, 4\)"),
        ({"weight": torch.zeros(5, 4, dtype=F64)}, ValueError, "weight has number of channels 5, but x has 3"),
        ({"weight": torch.zeros(3, 0, dtype=F64)}, ValueError, "weight must have a width W >= 1"),
        ({"weight": torch.zeros(3, 4)}, TypeError, "weight is torch.float32, but x is torch.float64"),
        ({"bias": torch.zeros(4, dtype=F64)}, ValueError, r"bias must have shape \(3,\), got \(4,\)"),
        ({"activation": "relu"}, ValueError, "activation must be one of 'silu', None, got 'relu'"),
        ({"residual": 1}, TypeError, "residual must be True or False, got 1"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool, device="meta")}, ValueError, "on meta, but x is on cpu"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "the batch size must be 1, got 2"),
        ({"initial_state": torch.zeros(2, 3, 3)}, TypeError, r"must be ConvolutionState\(inputs\) .* got Tensor"),
        ({"initial_state": ConvolutionState(torch.zeros(2, 4, 3))}, ValueError, r"must have shape \(2, 3, 3\)"),
    ],
)
def test_wrong_calls_say_what_is_allowed(change, error, message):
    arguments = {**make(4, state=False), **change}
    with pytest.raises(error, match=message):
        short_convolution_with_state(**arguments)


def test_a_step_takes_one_token():
    inputs = make(1)
    with pytest.raises(ValueError, match=r"x_t must be \(B, C\), got shape \(2, 1, 3\)"):
        short_convolution_step(inputs["x"], inputs["weight"], None, None)
