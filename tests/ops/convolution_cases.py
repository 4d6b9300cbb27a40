"""Inputs of the short convolution, and all that a form returns for them."""

import torch

from linattn import short_convolution, short_convolution_step, short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState
from ops.exponential_cases import cast

F64 = torch.float64
AXIS = 1  # of tokens
FORMS = ["recurrent", "chunked"]
SHARED = ("weight", "bias", "initial_state")  # what is not per token
plain = short_convolution
LOW = 1e-6  # a few roundings of 6e-8, of a window


def make(T, *, B=2, C=3, W=4, n=None, dtype=F64, seed=0, state=True):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, T, C), "weight": (C, W), "bias": (C,)}
    inputs = {name: torch.randn(*shape, generator=g, dtype=F64) for name, shape in shapes.items()}
    if state:
        inputs["initial_state"] = ConvolutionState(torch.randn(B if n is None else n, W - 1, C, generator=g, dtype=F64))
    return cast(inputs, dtype)


def tiny(n):
    return make(5, B=1, C=2, W=3, n=n)


def call(inputs, **options):
    return short_convolution_with_state(**inputs, **({"activation": "silu", "residual": True} | options))


def call_step(inputs, state):
    return short_convolution_step(*inputs.values(), state, activation="silu", residual=True)


def true_results(inputs, **options):
    output, (state,) = call(inputs, **options)
    return output, state
