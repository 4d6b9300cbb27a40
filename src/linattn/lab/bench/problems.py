"""Functions of attention at given sizes: their inputs, their value by any form of this library, their exact values.

Tensors are in the common layout: ``q, k (B, H, T, K)``, ``v (B, H, T, V)``, gates ``(B, H, T)`` in fp32, a
convolution's ``x (B, T, C)``. Features are given, except for mechanisms, which map q and k themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.bench.check import Verdict, judge, relative_errors
from linattn.lab.bench.timing import Unmeasured
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism, mechanism_info
from linattn.ops.convolution.api import short_convolution
from linattn.ops.exponential.api import exponential_attention
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.types import LinearState

Tensors = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]
Family = Literal["attention", "mechanism", "exponential", "sigmoid", "step", "convolution"]
PARAMETER = "parameter "
CONSTANT = ("kv", "z")  # inputs that need no gradient
MOST_PAIRS = 2**22  # of one head in the quadratic form


@dataclass(frozen=True)
class Problem:
    """``q (B, H, T, K)``, ``v (B, H, T, V)``; a convolution has ``x (B, T, K)`` and W taps, a step has no T."""

    name: str
    family: Family
    B: int
    H: int
    T: int
    K: int
    V: int
    causal: bool = True
    decay: str = "none"
    normalized: bool = False
    mechanism: str = ""
    taps: int = 0

    @property
    def shape(self) -> str:
        if self.family == "convolution":
            return f"B{self.B} T{self.T} C{self.K} W{self.taps}"
        width = f"D{self.K}" if self.K == self.V else f"K{self.K} V{self.V}"
        length = "" if self.family == "step" else f"T{self.T} "
        return f"B{self.B} H{self.H} {length}{width}"

    @property
    def uses_input(self) -> bool:
        return self.family == "mechanism" and mechanism_info(self.mechanism).uses_input

    def resized(self, B: int, H: int, T: int, width: int = 10**6) -> "Problem":
        """The same case with no size larger than these."""
        return replace(
            self, B=min(self.B, B), H=min(self.H, H), T=min(self.T, T), K=min(self.K, width), V=min(self.V, width)
        )  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A contender with its tensors; ``run()`` reads ``leaves``, which are in the contender's own layout.

    ``into`` converts a tensor from the common layout to the contender's, ``back`` converts an output or a gradient to
    the common one; the gradient of the output has the name ``output``.
    """

    leaves: Tensors
    run: Callable[[], Outputs]
    into: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    back: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor

    def call(self, grad: Tensor | None) -> Callable[[], Outputs]:
        """The call that is timed: inference, which keeps nothing for backward, or both passes with a fixed gradient."""
        if grad is None:
            return torch.no_grad()(self.run)
        leaves, own = [leaf.requires_grad_() for leaf in self.leaves.values()], self.into("output", grad)

        def train() -> tuple[Tensor, ...]:
            output = self.run()
            assert isinstance(output, Tensor)
            return output, *torch.autograd.grad(output, leaves, own)

        return train

    def values(self, grad: Tensor | None) -> Tensors:
        """Outputs by name in the common layout, and gradients if one of the output is given."""
        found = self.call(grad)()
        outputs = found if isinstance(found, tuple) else (found,)
        others = [f"state {i}" for i in range(len(outputs) - 1)]
        names = ["output", *(others if grad is None else [f"gradient of {name}" for name in self.leaves])]
        return {name: self.back(name, t.detach()) for name, t in zip(names, outputs, strict=True)}


Bind = Callable[[Problem, Tensors], Bound]


def draw(case: Problem, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Tensors, Tensor]:
    """Random tensors, and a gradient of the output; on the device, so that no case waits for a copy of gigabytes."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    tensors = _inputs(case, normal, device, dtype, seed)
    like = tensors["x" if case.family == "convolution" else "v"]
    generator.manual_seed(seed + 1)
    return tensors, normal(*like.shape)


def _inputs(case: Problem, normal: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Tensors:
    if case.family == "convolution":
        return {"x": normal(case.B, case.T, case.K), "weight": normal(case.K, case.taps), "bias": normal(case.K)}
    length = () if case.family == "step" else (case.T,)
    q, k = (normal(case.B, case.H, *length, case.K) for _ in range(2))
    tensors = {"q": q, "k": k, "v": normal(case.B, case.H, *length, case.V)}
    if case.family == "mechanism":
        if case.uses_input:
            tensors["x"] = normal(case.B, case.T, case.H * case.K)
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


def differentiable(case: Problem, tensors: Tensors) -> Tensors:
    """The inputs that need a gradient: all but states and the fixed decay of a head."""
    fixed = (*CONSTANT, "log_decay") if case.decay == "head" else CONSTANT
    return {name: t for name, t in tensors.items() if name not in fixed}


def bind_form(impl: str) -> Bind:
    """Bind the case's function to a form of this library, with new leaves that share the given memory."""

    def bind(case: Problem, tensors: Tensors) -> Bound:
        own = {name: t.detach() for name, t in tensors.items()}
        if case.family != "mechanism":
            return Bound(differentiable(case, own), lambda: compute(case, own, impl))
        module = _module(case, impl, own["q"].device, own["q"].dtype, seed=0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(own[PARAMETER + name])
        leaves = own | {PARAMETER + name: p for name, p in module.named_parameters()}
        return Bound(leaves, lambda: module(own["q"], own["k"], own["v"], x=own.get("x")))

    return bind


def compute(case: Problem, t: Tensors, impl: str) -> Outputs:
    """Compute any family except mechanisms, which have a module."""
    if case.family == "convolution":
        return short_convolution(t["x"], t["weight"], t["bias"], residual=True, impl=impl)
    if case.family == "step":
        return _step(t, impl)
    if case.family == "exponential":
        return exponential_attention(
            t["q"], t["k"], t["v"], log_input=t["log_input"], log_decay=t["log_decay"], impl=impl
        )
    # The log weight of a key for a sigmoid gate, with the scale of the scores included.
    log_input = F.logsigmoid(t["log_input"]) - 0.5 * math.log(case.K) if case.family == "sigmoid" else None
    return linear_attention(
        t["q"], t["k"], t["v"], causal=case.causal, log_decay=t.get("log_decay"), log_input=log_input,
        normalizer="sum" if case.normalized else None, impl=impl, validate=False,
    )  # fmt: skip


def _step(t: Tensors, impl: str) -> Outputs:
    state = LinearState(t["kv"], t["z"])
    if impl == "triton":
        from linattn.kernels.common.support import reason_against
        from linattn.kernels.step.attend import attend_step

        if reason := reason_against(t["q"]):
            raise Unmeasured("absent", reason)
        options: dict[str, Any] = {"log_decay": None, "normalizer": "sum", "eps": 1e-6, "out_dtype": t["v"].dtype}
        output, state = attend_step(t["q"], t["k"], t["v"], state, **options)
        return output, state.kv, state.k
    # As one token of a sequence: the step itself uses kernels if there are any.
    q, k, v = (t[name].unsqueeze(2) for name in ("q", "k", "v"))
    output, state = linear_attention_with_state(q, k, v, initial_state=state, causal=True, impl=impl, validate=False)
    return output.squeeze(2), state.kv, state.k


def _module(case: Problem, impl: str, device: torch.device, dtype: torch.dtype, seed: int) -> Mechanism:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = create_mechanism(case.mechanism, num_heads=case.H, head_dim=case.K, causal=case.causal, impl=impl)
    return module.to(device, dtype)


def bind_softmax(case: Problem, tensors: Tensors) -> Bound:
    """Bind PyTorch's softmax attention, in any of its kernels that serves."""
    q, k, v = (tensors[n].detach() for n in ("q", "k", "v"))
    leaves = {"q": q, "k": k, "v": v}
    return Bound(leaves, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal))


class Truth:
    """Exact values of a case, computed when they are first needed, and what contenders are allowed.

    They are computed in fp64 at the size that is timed, for the first and last heads of the first and last sequence: by
    the quadratic form where it fits, else by the chunked form, which the contracts compare with it; softmax that does
    not fit is PyTorch's own in fp32. Plain is the same form in the dtype that is timed.
    """

    def __init__(self, case: Problem, tensors: Tensors, grad: Tensor) -> None:
        self.case, self.dtype = case, tensors["x" if case.family == "convolution" else "v"].dtype
        self.inputs, self.grad = corners(case, tensors), corners(case, {"output": grad})["output"]
        B, H, *_ = self.inputs.get("q", self.inputs.get("x", grad)).shape
        self.corner = replace(case, B=B, H=H if case.family != "convolution" else case.H)
        self.fits = case.T**2 * (case.K if case.decay == "channel" else 1) <= MOST_PAIRS
        self._known: dict[bool, tuple[Tensors, dict[str, float], str]] = {}

    def check(self, bound: Bound, grad: Tensor | None, *, softmax: bool = False) -> Verdict:
        """Check what a contender gives for the inputs that are timed."""
        if softmax not in self._known:
            step = self.case.family == "step"
            form = "recurrent" if step else "reference" if self.fits else "chunked"
            bind: Bind = bind_softmax if softmax else bind_form(form)
            wide = torch.float64 if self.fits or not softmax or not self.grad.is_cuda else torch.float32
            own_grad = None if step else self.grad
            inputs = {name: t.to(wide) for name, t in self.inputs.items()}
            exact = bind(self.corner, inputs).values(None if own_grad is None else own_grad.to(wide))
            plain = relative_errors(bind(self.corner, self.inputs).values(own_grad), exact)
            self._known[softmax] = exact, plain, f"fp{torch.finfo(wide).bits}, {self.case.shape}"
        exact, plain, against = self._known[softmax]
        errors = relative_errors(corners(self.case, bound.values(grad)), exact)
        return judge(errors, plain, torch.finfo(self.dtype).eps, against)


def corners(case: Problem, tensors: Tensors) -> Tensors:
    """First and last sequences and heads; whole for a mechanism, which may mix heads, and for a convolution.

    Both have parameters, whose gradients are sums over all sequences.
    """
    if case.family in ("mechanism", "convolution"):
        return tensors
    sequences, heads = (sorted({0, size - 1}) for size in (case.B, case.H))
    return {name: t[heads] if t.ndim == 1 else t[sequences][:, heads] for name, t in tensors.items()}


def drawn(case: Problem, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Tensors, Tensor, Truth]:
    """What :func:`draw` gives, and its truth."""
    tensors, grad = draw(case, device, dtype, seed)
    return tensors, grad, Truth(case, tensors, grad)
