"""The contenders: the forms of linear attention, softmax attention, and any registered mechanism.

Contenders that compute the same function share a :class:`Function`, which knows its own quadratic form; they are all
checked against that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.bench.inputs import Inputs
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.token_loop import token_loop
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism, mechanism_info
from linattn.ops.linear.api import linear_attention, linear_attention_with_state

SDPA = "sdpa"
Run = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Function:
    """What contenders compute, in the forms that serve as its specification. All follow the dtype of the inputs."""

    name: str
    quadratic: Run
    linear_time: Run  # for lengths at which nothing quadratic fits
    with_state: Callable[[Inputs, Any], tuple[Tensor, Any]] | None = None  # the quadratic form, cut into pieces
    rows: Callable[[Inputs, Tensor], Tensor] | None = None  # the quadratic form, for some queries only


@dataclass(frozen=True)
class Contender:
    """One line of the table; ``growth`` is the power of T that its time and memory should grow with."""

    name: str
    run: Run
    function: Function
    time_growth: int
    memory_growth: int
    uses: tuple[str, ...] = ("phi_q", "phi_k", "v", "log_decay")
    longest_weighed: int | None = None  # beyond this, records of allocations would outweigh the call
    plain: Run | None = None  # its order of sums written plainly, if that loses more than the quadratic form


def make_contenders(config: BenchConfig) -> list[Contender]:
    """All contenders; softmax attention comes first, as all others are compared to it."""
    linear = _linear_function(config)
    forms = [_form(config, impl, linear) for impl in dict.fromkeys(config.impl)]
    mechanisms = [_mechanism(config, name) for name in dict.fromkeys(config.mechanisms)]
    return [_softmax(config), *forms, *mechanisms]


def _form(config: BenchConfig, impl: str, function: Function) -> Contender:
    growth = 2 if impl == "reference" else 1
    run = partial(_linear, config.causal, impl)
    if impl == "recurrent":
        plain = partial(token_loop, config.causal)
        return Contender(impl, run, function, growth, growth, longest_weighed=1024, plain=plain)
    return Contender(impl, run, function, growth, growth)


def _linear(causal: bool, impl: str, inputs: Inputs) -> Tensor:
    return linear_attention(inputs.phi_q, inputs.phi_k, inputs.v, causal=causal, log_decay=inputs.log_decay, impl=impl)


def _linear_function(config: BenchConfig) -> Function:
    def with_state(inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        return linear_attention_with_state(
            inputs.phi_q, inputs.phi_k, inputs.v, initial_state=state, causal=True, log_decay=inputs.log_decay,
            impl="reference",
        )  # fmt: skip

    def rows(inputs: Inputs, index: Tensor) -> Tensor:
        return linear_attention(
            inputs.phi_q[:, :, index], inputs.phi_k, inputs.v, impl="reference"
        )  # fmt: skip

    return Function(
        "linear",
        partial(_linear, config.causal, "reference"),
        partial(_linear, config.causal, "chunked"),
        with_state=with_state if config.causal else None,
        # Without a mask or a decay queries do not depend on positions, so the op accepts any subset of them.
        rows=rows if not config.causal and config.decay == "none" else None,
    )


def _softmax(config: BenchConfig) -> Contender:
    def sdpa(inputs: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=config.causal)

    def rows(inputs: Inputs, index: Tensor) -> Tensor:
        scores = inputs.q[:, :, index] @ inputs.k.transpose(-1, -2) * inputs.q.shape[-1] ** -0.5
        if config.causal:
            future = torch.arange(inputs.length, device=index.device) > index[:, None]
            scores = scores.masked_fill(future, -torch.inf)
        return scores.softmax(-1) @ inputs.v

    def quadratic(inputs: Inputs) -> Tensor:
        return rows(inputs, torch.arange(inputs.length, device=inputs.q.device))

    function = Function("softmax", quadratic, sdpa, rows=rows)
    return Contender(SDPA, sdpa, function, time_growth=2, memory_growth=1, uses=("q", "k", "v"))


def _mechanism(config: BenchConfig, name: str) -> Contender:
    info = mechanism_info(name)

    def build(impl: str, dtype: torch.dtype) -> Mechanism:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # every form gets the same parameters
            mechanism = create_mechanism(
                name, num_heads=config.heads, head_dim=config.head_dim, causal=config.causal, impl=impl
            )
        return mechanism.to(config.torch_device, dtype)

    def call(mechanism: Mechanism, inputs: Inputs) -> Tensor:
        return mechanism(inputs.q, inputs.k, inputs.v, x=inputs.x if info.uses_input else None)

    def form(impl: str, inputs: Inputs) -> Tensor:
        return call(build(impl, inputs.q.dtype), inputs)

    def with_state(inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        x = inputs.x if info.uses_input else None
        return build("reference", inputs.q.dtype).with_state(inputs.q, inputs.k, inputs.v, state=state, x=x)

    function = Function(
        f"mechanism {name}",
        partial(form, "reference"),
        partial(form, "chunked"),
        with_state=with_state if config.causal and info.state != "none" else None,
    )
    growth = 1 if info.cost == "linear" else 2
    uses = ("q", "k", "v", "x") if info.uses_input else ("q", "k", "v")
    return Contender(name, partial(call, build("auto", config.torch_dtype)), function, growth, growth, uses)
