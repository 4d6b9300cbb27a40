"""Inputs of exponential attention, and all that a form returns for them."""

import torch

from linattn import exponential_attention, exponential_attention_step, exponential_attention_with_state
from linattn.ops.exponential.call import ExponentialState

F64 = torch.float64
AXIS = 2  # of tokens
FORMS = ["recurrent", "chunked"]
SHARED = ("initial_state",)  # what is not per token
plain = exponential_attention
LOW = 1e-5  # fp32 sums over 100 tokens


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


def tiny(n):
    return make(5, B=1, H=2, H_kv=1, K=2, V=2, n=n)


def change(inputs, f):
    """``f`` of every tensor."""
    return {n: type(x)(*map(f, x)) if isinstance(x, tuple) else f(x) for n, x in inputs.items()}


def cast(inputs, dtype):
    return change(inputs, lambda x: x.to(dtype))


def leaves(inputs):
    return [x for value in inputs.values() for x in (value if isinstance(value, tuple) else (value,))]


def call(inputs, **options):
    inputs = dict(inputs)
    return exponential_attention_with_state(inputs.pop("q"), inputs.pop("k"), inputs.pop("v"), **inputs, **options)


def call_step(inputs, state):
    q, k, v, log_input, log_decay = (inputs[n] for n in ("q", "k", "v", "log_input", "log_decay"))
    return exponential_attention_step(q, k, v, state, log_input=log_input, log_decay=log_decay)


def true_results(inputs, **options):
    """The output and the state without its unit, which says how it is written and not what it is."""
    output, (kv, k, log_scale) = call(inputs, **options)
    unit = torch.where(log_scale == -torch.inf, 0, log_scale.exp())
    return output, unit[..., None, None] * kv, unit[..., None] * k
