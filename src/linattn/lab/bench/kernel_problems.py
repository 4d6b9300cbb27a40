"""The function of a case: its input tensors, its value by any form of this library, its exact values.

Tensors are in the common layout: ``q, k (B, H, T, K)``, ``v (B, H, T, V)``, gates ``(B, H, T)`` in fp32, a
convolution's ``x (B, T, C)``. Features are given, except for mechanisms, which map q and k themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.bench.check import Verdict, budgets_of, judge, relative_errors
from linattn.lab.bench.kernel_cases import Problem
from linattn.lab.bench.running import Absent
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.convolution.api import short_convolution
from linattn.ops.exponential.api import exponential_attention
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.types import LinearState, Normalizer

Tensors = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]
PARAMETER = "parameter "
CONSTANT = ("kv", "z")  # inputs that need no gradient
SLACK_AT_FULL_SIZE = 4.0


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
            return self._forward
        leaves, own = [leaf.requires_grad_() for leaf in self.leaves.values()], self.into("output", grad)

        def train() -> tuple[Tensor, ...]:
            output = self.run()
            assert isinstance(output, Tensor)
            return output, *torch.autograd.grad(output, leaves, own)

        return train

    @torch.no_grad()
    def _forward(self) -> Outputs:
        return self.run()

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

    def with_gradient(tensors: Tensors) -> tuple[Tensors, Tensor]:
        like = tensors["x" if case.family == "convolution" else "v"]
        own = torch.Generator(device).manual_seed(seed + 1)
        return tensors, torch.randn(like.shape, generator=own, device=device).to(dtype)

    if case.family == "convolution":
        return with_gradient(
            {"x": normal(case.B, case.T, case.K), "weight": normal(case.K, case.taps), "bias": normal(case.K)}
        )  # fmt: skip
    length = () if case.family == "step" else (case.T,)
    q, k = (normal(case.B, case.H, *length, case.K) for _ in range(2))
    tensors = {"q": q, "k": k, "v": normal(case.B, case.H, *length, case.V)}
    if case.family == "mechanism":
        module = _module(case, "reference", torch.device("cpu"), torch.float32, seed)
        parameters = {PARAMETER + n: p.detach().to(device, dtype) for n, p in module.named_parameters()}
        return with_gradient(tensors | parameters)
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
    return with_gradient(tensors)


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
        return Bound(leaves, lambda: module(own["q"], own["k"], own["v"]))

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
        )  # fmt: skip
    normalizer: Normalizer = "sum" if case.normalized else None
    # The log weight of a key for a sigmoid gate, with the scale of the scores included.
    log_input = F.logsigmoid(t["log_input"]) - 0.5 * math.log(case.K) if case.family == "sigmoid" else None
    return linear_attention(
        t["q"], t["k"], t["v"], causal=case.causal, log_decay=t.get("log_decay"), log_input=log_input,
        normalizer=normalizer, impl=impl, validate=False,
    )  # fmt: skip


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


def _module(case: Problem, impl: str, device: torch.device, dtype: torch.dtype, seed: int) -> Mechanism:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = create_mechanism(case.mechanism, num_heads=case.H, head_dim=case.K, causal=case.causal, impl=impl)
    return module.to(device, dtype)


def bind_exact_softmax(case: Problem, tensors: Tensors) -> Bound:
    """Bind softmax attention as it is defined, in the dtype of its inputs."""
    q, k, v = (tensors[n].detach() for n in ("q", "k", "v"))

    def run() -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if case.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    return Bound({"q": q, "k": k, "v": v}, run)


class Truth:
    """Exact values of a case, computed when they are first needed, and what contenders are allowed.

    At a reduced size they are those of the quadratic form in fp64, with the error of plain that of the same form in the
    dtype that is timed. A kernel may work differently at the timed size, so it is checked there too, against the
    chunked form in fp64, at the first and last heads of the first and last sequence; sums are longer there, and the
    budget is four times as large.
    """

    def __init__(self, case: Problem, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.case, self.small, self.dtype = case, case.reduced(), dtype
        self.tensors, grad = draw(self.small, device, dtype, seed + 2)
        self.grad = None if case.family == "step" else grad
        self._exact: dict[bool, tuple[Tensors, dict[str, float]]] = {}
        self._full: Tensors | None = None

    def check(self, bind: Bind, softmax: bool, backward: bool) -> Verdict:
        """Check a contender at the reduced size."""
        exact, budgets = self._small(softmax)
        found = bind(self.small, self.tensors).values(self.grad if backward else None)
        return judge(relative_errors(found, exact), budgets, f"fp64, {self.small.shape}")

    def check_full(self, bound: Bound, tensors: Tensors, grad: Tensor, backward: bool) -> Verdict:
        """Check a contender at the size that is timed."""
        if self._full is None:
            wide = {name: t.double() for name, t in corners(self.case, tensors).items()}
            own = next(t for name, t in wide.items() if name in ("q", "x"))
            heads = own.shape[1] if self.case.family != "convolution" else self.case.H
            form = "recurrent" if self.case.family == "step" else "chunked"
            own_grad = None if self.grad is None else corners(self.case, {"output": grad})["output"].double()
            exact = bind_form(form)(replace(self.case, B=own.shape[0], H=heads), wide).values(own_grad)
            # The gradient of a parameter is a sum over all sequences, which cannot be checked on some of them.
            mixes = self.case.family == "mechanism"
            self._full = {name: t for name, t in exact.items() if not (mixes and PARAMETER in name)}
        budgets = {name: SLACK_AT_FULL_SIZE * b for name, b in self._small(False)[1].items()}
        found = corners(self.case, bound.values(grad if backward else None))
        return judge(relative_errors(found, self._full), budgets, f"fp64, {self.case.shape}")

    def _small(self, softmax: bool) -> tuple[Tensors, dict[str, float]]:
        if softmax not in self._exact:
            bind: Bind = bind_exact_softmax if softmax else bind_form("reference")
            wide = {name: t.double() for name, t in self.tensors.items()}
            exact = bind(self.small, wide).values(None if self.grad is None else self.grad.double())
            plain = relative_errors(bind(self.small, self.tensors).values(self.grad), exact)
            self._exact[softmax] = exact, budgets_of(plain, self.dtype)
        return self._exact[softmax]


def corners(case: Problem, tensors: Tensors) -> Tensors:
    """First and last sequences and heads, if these are computed independently; parameters stay whole.

    A mechanism may mix heads, and a convolution has none and sums over sequences: these tensors stay whole too.
    """
    if case.family == "convolution":
        return tensors

    def ends(size: int) -> list[int]:
        return sorted({0, size - 1})

    def cut(name: str, t: Tensor) -> Tensor:
        if PARAMETER in name:
            return t
        if t.ndim == 1:  # a decay per head
            return t[ends(case.H)]
        return t[ends(case.B)] if case.family == "mechanism" else t[ends(case.B)][:, ends(case.H)]

    return {name: cut(name, t) for name, t in tensors.items()}
