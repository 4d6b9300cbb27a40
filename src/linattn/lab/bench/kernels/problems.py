"""The function of a case: its input tensors, and its value by any form of this library.

Tensors are in the common layout: ``q, k (B, H, T, K)``, ``v (B, H, T, V)``, gates ``(B, H, T)`` in fp32, a
convolution's ``x (B, T, C)``. Features are given, except for mechanisms, which map q and k themselves.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.bench.kernels.bound import Absent, Bound, Outputs, Tensors
from linattn.lab.bench.kernels.cases import Case
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.convolution.api import short_convolution
from linattn.ops.exponential.api import exponential_attention
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.types import LinearState, Normalizer

PARAMETER = "parameter "
CONSTANT = ("kv", "z")  # inputs that need no gradient


def draw(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> Tensors:
    """Draw random tensors on the device, so that no case waits for a copy of gigabytes."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    if case.family == "convolution":
        return {"x": normal(case.B, case.T, case.K), "weight": normal(case.K, case.taps), "bias": normal(case.K)}
    length = () if case.family == "step" else (case.T,)
    q, k = (normal(case.B, case.H, *length, case.K) for _ in range(2))
    tensors = {"q": q, "k": k, "v": normal(case.B, case.H, *length, case.V)}
    if case.family == "mechanism":
        module = _module(case, "reference", torch.device("cpu"), torch.float32, seed)
        return tensors | {PARAMETER + n: p.detach().to(device, dtype) for n, p in module.named_parameters()}
    if case.normalized:  # weights of one sign, as feature maps with a normaliser give
        tensors |= {"q": F.elu(q) + 1, "k": F.elu(k) + 1}
    elif case.family == "attention":
        tensors |= {"q": q * case.K**-0.25, "k": k * case.K**-0.25}
    gate_shape = (case.B, case.H, case.T, case.K)[: 4 if case.decay == "channel" else 3]
    wide = torch.promote_types(dtype, torch.float32)
    if case.decay == "head":  # RetNet's
        tensors["log_decay"] = (1 - 2.0 ** (-5 - torch.arange(case.H, device=device, dtype=wide))).log()
    elif case.decay != "none":  # open most of the time, as trained gates are
        tensors["log_decay"] = F.logsigmoid(normal(*gate_shape, dtype=wide) + 3)
    if case.family in ("exponential", "sigmoid"):
        tensors["log_input"] = normal(*gate_shape, dtype=wide)
    if case.family == "step":
        tensors["kv"] = normal(case.B, case.H, case.K, case.V, dtype=wide)
        tensors["z"] = 10 * normal(case.B, case.H, case.K, dtype=wide).abs()
    return tensors


def differentiable(case: Case, tensors: Tensors) -> Tensors:
    """The inputs that need a gradient: all but states and the fixed decay of a head."""
    fixed = (*CONSTANT, "log_decay") if case.decay == "head" else CONSTANT
    return {name: t for name, t in tensors.items() if name not in fixed}


def bind_form(impl: str) -> Callable[[Case, Tensors], Bound]:
    """Bind the case's function to a form of this library, with new leaves that share the given memory."""

    def bind(case: Case, tensors: Tensors) -> Bound:
        own = {name: t.detach() for name, t in tensors.items()}
        if case.family != "mechanism":
            return Bound(differentiable(case, own), lambda: compute(case, own, impl))
        module = _module(case, impl, own["q"].device, own["q"].dtype, seed=0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(own[PARAMETER + name])
        parameters = {PARAMETER + name: p for name, p in module.named_parameters()}
        leaves = {name: parameters.get(name, t) for name, t in own.items()}
        return Bound(leaves, lambda: module(own["q"], own["k"], own["v"]))

    return bind


def compute(case: Case, t: Tensors, impl: str) -> Outputs:
    """Compute any family except mechanisms, which have a module."""
    normalizer: Normalizer = "sum" if case.normalized else None
    if case.family == "convolution":
        return short_convolution(t["x"], t["weight"], t["bias"], residual=True, impl=impl)
    if case.family == "step":
        return _step(t, impl)
    if case.family == "exponential":
        return exponential_attention(
            t["q"], t["k"], t["v"], log_input=t["log_input"], log_decay=t["log_decay"], impl=impl
        )  # fmt: skip
    log_input = log_weights(t["log_input"], case.K) if case.family == "sigmoid" else None
    return linear_attention(
        t["q"], t["k"], t["v"], causal=case.causal, log_decay=t.get("log_decay"), log_input=log_input,
        normalizer=normalizer, impl=impl, validate=False,
    )  # fmt: skip


def log_weights(log_input: Tensor, width: int) -> Tensor:
    """The log weight of a key for a sigmoid gate, with the scale of the scores included."""
    return F.logsigmoid(log_input) - 0.5 * math.log(width)


def _step(t: Tensors, impl: str) -> Outputs:
    state = LinearState(t["kv"], t["z"])
    if impl in ("triton", "triton in place"):
        from linattn.kernels.common.support import reason_against
        from linattn.kernels.step.attend import attend_step, attend_step_

        reason = reason_against(t["q"])
        if reason:
            raise Absent(reason)
        call = attend_step if impl == "triton" else attend_step_
        output, state = call(
            t["q"], t["k"], t["v"], state, log_decay=None, normalizer="sum", eps=1e-6, out_dtype=t["v"].dtype
        )
        return output, state.kv, state.k
    # As one token of a sequence: the step itself uses kernels if there are any.
    q, k, v = (t[name].unsqueeze(2) for name in ("q", "k", "v"))
    output, state = linear_attention_with_state(q, k, v, initial_state=state, causal=True, impl=impl, validate=False)
    return output.squeeze(2), state.kv, state.k


def _module(case: Case, impl: str, device: torch.device, dtype: torch.dtype, seed: int) -> Mechanism:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = create_mechanism(
            case.mechanism, num_heads=case.H, head_dim=case.K, causal=case.causal, impl=impl
        )  # fmt: skip
    return module.to(device, dtype)
