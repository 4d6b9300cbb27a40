"""Inputs of exponential attention, and all that a form returns for them. Shared by its tests."""

import torch

from linattn import exponential_attention_with_state
from linattn.ops.exponential.call import ExponentialState

FORMS = ["recurrent", "chunked"]
LENGTHS = [1, 2, 63, 64, 65, 197, 300]
F64 = torch.float64


def make(T, *, B=2, H=4, H_kv=2, K=5, V=6, dtype=F64, seed=0, n=None, state=True):
    """Gates around 1, so that both branches of max(|q . n|, 1) are taken and no denominator is near 0."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    n = B if n is None else n
    inputs = {
        "q": draw(B, H, T, K),
        "k": draw(B, H_kv, T, K),
        "v": draw(B, H_kv, T, V),
        "log_input": draw(B, H_kv, T) - 1,
        "log_decay": torch.nn.functional.logsigmoid(draw(B, H_kv, T) + 1),
    }
    if state:
        inputs["initial_state"] = ExponentialState(draw(n, H_kv, K, V), draw(n, H_kv, K), draw(n, H_kv))
    return cast(inputs, dtype)


def cast(inputs, dtype):
    return {
        name: ExponentialState(*(x.to(dtype) for x in value)) if name == "initial_state" else value.to(dtype)
        for name, value in inputs.items()
    }


def leaves(inputs):
    return [x for value in inputs.values() for x in (value if isinstance(value, tuple) else (value,))]


def call(inputs, **options):
    inputs = dict(inputs)
    return exponential_attention_with_state(inputs.pop("q"), inputs.pop("k"), inputs.pop("v"), **inputs, **options)


def results(inputs, **options):
    """Output, state and the gradients of everything, for a loss that also reads the true state."""
    inputs = {
        name: ExponentialState(*(y.detach().requires_grad_() for y in x))
        if name == "initial_state"
        else x.detach().requires_grad_()
        for name, x in inputs.items()
    }
    output, state = call(inputs, **options)
    unit = torch.where(state.log_scale == -torch.inf, 0, state.log_scale.exp())
    kv, k = unit[..., None, None] * state.kv, unit[..., None] * state.k
    g = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=g, dtype=F64).to(x) for x in (output, kv, k)]
    loss = sum((x * w).sum() for x, w in zip((output, kv, k), weights, strict=True))
    gradients = torch.autograd.grad(loss, leaves(inputs))
    return [x.detach() for x in (output, *state, *gradients)]


def assert_same(found, expected, tolerance=1e-10):
    """Relative to the largest entry: gradients scale with the number of tokens they sum over."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def some_mask(T, B=2):
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[0, : min(T, 3)] = False
    mask[1, T // 2 :] = False
    return mask
