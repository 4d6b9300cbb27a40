"""What `linattn bench` times: the forms of linear attention, softmax attention, registered mechanisms; their inputs.

Contenders that compute the same function share a :class:`Function`, which knows its own quadratic form; all are
checked against that.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism, mechanism_info
from linattn.ops.linear.api import linear_attention
from linattn.ops.maps import EluPlusOne

SDPA = "sdpa"
FORWARD, TRAINING = "forward", "forward+backward"
EPS = 1e-6  # the default of linear_attention


@dataclass(frozen=True)
class Inputs:
    """``q, k, v (B, H, T, D)``, a log_decay if one was asked for, and ``x (B, T, H D)`` for gates.

    ``phi_q, phi_k`` are the features ``elu + 1`` of q and k, from which the forms of linear attention start. Computing
    them is not part of a form and is not timed with one; the mechanism ``elu`` times both.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    x: Tensor
    phi_q: Tensor
    phi_k: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Inputs":
        return replace(self, **{name: change(name, t) for name, t in self.tensors().items()})

    def to(self, dtype: torch.dtype) -> "Inputs":
        return self.map(lambda _, t: t.to(dtype))

    def copies(self, requires_grad: bool) -> "Inputs":
        """Copies as new leaves, so that a call's allocations start from nothing and gradients do not mix."""
        return self.map(lambda _, t: t.detach().clone().requires_grad_(requires_grad))

    def first(self, length: int) -> "Inputs":
        """The first tokens; a decay per head has no time."""
        return self.map(
            lambda name, t: t if t.ndim == 1 else t[:, :length] if name == "x" else t[:, :, :length]
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: t for name, t in given.items() if t is not None}


Run = Callable[[Inputs], Tensor]


def make_inputs(config: Any, length: int) -> Inputs:
    """Draw the inputs on the CPU from the seed, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, H, D = config.batch, config.heads, config.head_dim
    q, k, v = (normal(B, H, length, D) for _ in range(3))
    x = normal(B, length, H * D)
    log_decay: Tensor | None = None
    if config.decay == "head":
        log_decay = -torch.logspace(-3, -1, H)
    elif config.decay != "none":
        shape = (B, H, length) if config.decay == "token" else (B, H, length, D)
        log_decay = F.logsigmoid(normal(*shape) + 3)  # gates that are open most of the time, as trained ones are
    phi, dtype = EluPlusOne(), getattr(torch, config.dtype)
    inputs = Inputs(q, k, v, log_decay, x, phi(q), phi(k))
    # A decay is summed over the sequence, so like states and gates in the library it stays in fp32 or better.
    gate_dtype = torch.promote_types(dtype, torch.float32)
    return inputs.map(lambda name, t: t.to(config.place(), gate_dtype if name == "log_decay" else dtype))


@dataclass(frozen=True)
class Function:
    """What contenders compute: as it is defined, and for lengths at which nothing quadratic fits."""

    name: str
    quadratic: Run
    linear_time: Run


@dataclass(frozen=True)
class Contender:
    """One column of the table; ``powers`` of T with which its time and its memory should grow."""

    name: str
    run: Run
    function: Function
    powers: tuple[int, int]
    uses: tuple[str, ...] = ("phi_q", "phi_k", "v", "log_decay")
    longest_weighed: int | None = None  # beyond this, records of allocations would outweigh the call
    plain: Run | None = None  # its order of sums written plainly, if that loses more than the quadratic form


def make_contenders(config: Any) -> list[Contender]:
    """All contenders; softmax attention comes first, as all others are compared to it."""
    forms = {impl: partial(_linear, config.causal, impl) for impl in ("reference", "chunked", *config.impl)}
    function = Function("linear", forms["reference"], forms["chunked"])
    found = [_softmax(config.causal)]
    for impl in dict.fromkeys(config.impl):
        powers, slow = (2, 2) if impl == "reference" else (1, 1), impl == "recurrent"
        plain = partial(token_loop, config.causal) if slow else None
        found.append(
            Contender(impl, forms[impl], function, powers, longest_weighed=1024 if slow else None, plain=plain)
        )  # fmt: skip
    return found + [_mechanism(config, name) for name in dict.fromkeys(config.mechanisms)]


def _linear(causal: bool, impl: str, inputs: Inputs) -> Tensor:
    return linear_attention(inputs.phi_q, inputs.phi_k, inputs.v, causal=causal, log_decay=inputs.log_decay, impl=impl)


def _softmax(causal: bool) -> Contender:
    def sdpa(inputs: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal)

    def quadratic(inputs: Inputs) -> Tensor:
        scores = inputs.q @ inputs.k.transpose(-1, -2) * inputs.q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ inputs.v

    return Contender(SDPA, sdpa, Function("softmax", quadratic, sdpa), (2, 1), uses=("q", "k", "v"))


def _mechanism(config: Any, name: str) -> Contender:
    info = mechanism_info(name)

    def build(impl: str, dtype: torch.dtype) -> Mechanism:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # every form gets the same parameters
            mechanism = create_mechanism(
                name, num_heads=config.heads, head_dim=config.head_dim, causal=config.causal, impl=impl
            )
        return mechanism.to(config.place(), dtype)

    def call(mechanism: Mechanism, inputs: Inputs) -> Tensor:
        return mechanism(inputs.q, inputs.k, inputs.v, x=inputs.x if info.uses_input else None)

    def form(impl: str, inputs: Inputs) -> Tensor:
        return call(build(impl, inputs.q.dtype), inputs)

    function = Function(f"mechanism {name}", partial(form, "reference"), partial(form, "chunked"))
    powers = (1, 1) if info.cost == "linear" else (2, 2)
    uses = ("q", "k", "v", "x") if info.uses_input else ("q", "k", "v")
    return Contender(name, partial(call, build("auto", getattr(torch, config.dtype))), function, powers, uses)


def token_loop(causal: bool, inputs: Inputs) -> Tensor:
    """Linear attention written plainly, token by token: a measure of the precision that this order of sums loses.

    With any decay: that of the query token if causal, of the key token if not. The quadratic form rounds each score
    once and divides by the same score, so at the first tokens its error nearly cancels; and a decay that is multiplied
    in at every step collects a rounding error each time. A recurrence in low precision cannot reach the error of the
    quadratic form, but it can reach that of this loop, which shares no code with the measured forms.
    """
    dtype = torch.promote_types(inputs.v.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (inputs.phi_q, inputs.phi_k, inputs.v))
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the last channel sums the weights
    decay = torch.ones_like(q[..., :1]) if inputs.log_decay is None else inputs.log_decay.to(dtype).exp()
    if decay.ndim == 1:
        decay = decay[None, :, None].expand(q.shape[:3])
    decay = decay[..., None] if decay.ndim == 3 else decay
    T = inputs.length

    def sums(order: Iterable[int], *, decay_first: bool, see_itself: bool = True) -> Tensor:
        state, rows = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None, :]), []
        for t in order:
            factor, added = decay[:, :, t, :, None], k[:, :, t, :, None] * v[:, :, t, None, :]
            seen = factor * state + added if decay_first else state + added
            rows.append((q[:, :, t, None] @ (seen if see_itself else state)).squeeze(2))
            state = seen if decay_first else factor * seen
        return torch.stack(rows, dim=2)

    if causal:
        found = sums(range(T), decay_first=True)
    else:
        ahead = sums(range(T - 1, -1, -1), decay_first=False, see_itself=False)
        found = sums(range(T), decay_first=False) + ahead.flip(2)
    return (found[..., :-1] / (found[..., -1:] + EPS)).to(inputs.v.dtype)


def evaluate(run: Run, inputs: Inputs, uses: tuple[str, ...], grad: Tensor | None) -> dict[str, Tensor]:
    """The output and, for a gradient of the output, the gradients of the inputs that are used, which must be leaves."""
    if grad is None:
        with torch.no_grad():
            return {"output": run(inputs)}
    leaves = {name: t for name, t in inputs.tensors().items() if name in uses}
    output = run(inputs)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad)
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}


def gradient_of_output(inputs: Inputs, seed: int) -> Tensor:
    """A fixed random gradient of the output, which is shaped like v."""
    return torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(seed + 1)).to(inputs.v)


def timed_call(contender: Contender, inputs: Inputs, grad: Tensor | None) -> Callable[[], object]:
    """The call that is timed: no copies, no checks, only the pass itself."""
    leaves = inputs if grad is None else inputs.copies(requires_grad=True)
    return lambda: evaluate(contender.run, leaves, contender.uses, grad)


def weighed_call(contender: Contender, inputs: Inputs, training: bool) -> Callable[[], object]:
    """The call whose memory is measured: the same pass with inputs of its own, so that they count too."""
    used = inputs.map(lambda name, t: t if name in contender.uses else t[:0])

    def call() -> object:
        own = used.copies(requires_grad=training)
        return evaluate(contender.run, own, contender.uses, torch.ones_like(own.v) if training else None)

    return call
