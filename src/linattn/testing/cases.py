"""What all contracts share: what makes one of a function, and seeded inputs and mechanisms."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import MechanismInfo, mechanism_info
from linattn.ops.shared.call import FORMS
from linattn.testing.violation import ROUNDINGS, ContractViolation, Standard, largest

HEADS, HEAD_DIM, BATCH = 2, 8, 2
# Longer than a chunk of 64 and not a multiple of it, so that every form in blocks has a boundary inside.
LENGTH = 70
# A gradient smaller than its usual size by this factor is what is left of terms that cancel.
CANCELLED = 1e-2
# Seeds for moving inputs by a few roundings: the largest error varies by a factor of two from seed to seed.
MOVES = (5, 6, 7, 8)

Options = ParamSpec("Options")


@dataclass(frozen=True)
class Inputs:
    """q, k, v ``(B, H, T, D)`` and, for mechanisms that use it, x ``(B, T, C)``."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor | None = None

    @property
    def named(self) -> dict[str, Tensor]:
        return {name: t for name, t in vars(self).items() if t is not None}

    def change(self, f: Callable[[Tensor], Tensor]) -> "Inputs":
        return replace(self, **{name: f(t) for name, t in self.named.items()})

    def tokens(self, index: slice | Tensor) -> "Inputs":
        """The inputs of only these tokens."""
        return self.change(lambda t: t[:, :, index] if t.ndim == 4 else t[:, index])

    def row(self, b: int) -> "Inputs":
        return self.change(lambda t: t[b : b + 1])

    def fill(self, where: Tensor, value: float) -> "Inputs":
        """Put ``value`` into the tokens ``where (B, T)``."""
        return self.change(lambda t: t.masked_fill(where[:, None, :, None] if t.ndim == 4 else where[..., None], value))


Results = dict[str, Tensor]
Call = Callable[[Mechanism, Inputs], Results]


@dataclass(frozen=True)
class Subject:
    """A mechanism under test: its class, what it declares, and the options to build it with."""

    cls: type[Mechanism]
    info: MechanismInfo
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    impls: tuple[str, ...] = (*FORMS, "auto")

    @property
    def exact(self) -> bool:
        """Whether results are compared directly; in less than fp64 their errors must stay within a budget."""
        return self.dtype == torch.float64

    @property
    def modes(self) -> list[bool]:
        """The values of ``causal`` that the mechanism declares to support."""
        return [causal for causal in (True, False) if (self.info.causal if causal else self.info.bidirectional)]

    @property
    def has_state(self) -> bool:
        return self.info.causal and self.info.state != "none"

    def build(
        self, causal: bool, impl: str = "auto", *, grouped: bool = False, dtype: torch.dtype | None = None
    ) -> Mechanism:
        """Build an instance, with the same seed each time, so that every form gets the same parameters.

        Parameters are moved a little from their initial values: an identity or a zero would hide what they do.
        """
        heads = {"num_heads": 2 * HEADS, "num_kv_heads": HEADS} if grouped else {"num_heads": HEADS}
        options = {"head_dim": HEAD_DIM, **heads, **self.options}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            mechanism = self.cls(**options, causal=causal, impl=impl).double()
            with torch.no_grad():
                for parameter in mechanism.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        mechanism = mechanism.to(self.device, dtype or self.dtype)
        if not hasattr(self.cls, "info"):  # what the registry would have put there
            vars(mechanism)["info"] = self.info
        return mechanism

    def forms(self, causal: bool, *, impls: tuple[str, ...] | None = None, **options: Any) -> dict[str, Mechanism]:
        """One instance per form that the mechanism accepts; it refuses others at construction."""
        found = {}
        for impl in self.impls if impls is None else impls:
            try:
                found[impl] = self.build(causal, impl, **options)
            except ValueError as error:
                if "impl" not in str(error):
                    raise
        return found

    def each_form(self) -> Iterator[tuple[str, str, Mechanism]]:
        """Words for a case, the form, and an instance, for every form in every mode."""
        for causal in self.modes:
            for impl, built in self.forms(causal).items():
                yield f"{'causal' if causal else 'bidirectional'}, {impl}", impl, built

    def plain(self, like: Mechanism, impls: tuple[str, ...] = ("reference", "chunked")) -> list[Mechanism]:
        """Copies of ``like`` in forms of plain PyTorch, the definition first."""
        grouped = like.num_heads != like.num_kv_heads
        found = [*self.forms(like.causal, grouped=grouped, impls=impls).values()]
        weights = like.state_dict()
        for other in found:
            other.load_state_dict(weights)
        return found

    def standard(
        self, built: Mechanism, inputs: Inputs, call: Call | None = None, *, gradients: bool = True, steps: bool = False
    ) -> Standard:
        """The results of ``call`` on these inputs that others are compared with, gradients included.

        In fp64 they are the mechanism's own. In lower precision they are those of the definition in fp64, with the
        errors of plain PyTorch in the lower precision as a budget; for results made in ``steps`` also its errors token
        by token.
        """
        run = partial(evaluate if gradients else values, call=call or attend)
        if self.exact:
            return Standard(run(built, inputs))
        plain = self.plain(built)
        by_token = self.plain(built, ("recurrent",)) if steps else []
        exact, wide = copy.deepcopy(plain[0]).double(), inputs.change(Tensor.double)
        eps = torch.finfo(self.dtype).eps
        moved = [inputs.change(lambda t, s=seed: t * (1 + ROUNDINGS * eps * random_like(t, s))) for seed in MOVES]  # type: ignore[misc]
        costs = [run(form, inputs) for form in plain + by_token] + [run(form, x) for x in moved for form in plain]
        expected, tokens = run(exact, wide), inputs.k.shape[0] * inputs.k.shape[2]
        rests = self._rests(built, exact, expected, eps) if gradients and inputs.k.shape[2] == 1 else {}
        return Standard(expected, costs, eps, {f"gradient of {name}": tokens for name in trainable(built)}, rests)

    def _rests(self, built: Mechanism, exact: Mechanism, found: Results, eps: float) -> dict[str, float]:
        """Rounding errors to allow in the gradients of q and k of a single token where their terms cancel.

        They cancel under a normaliser, unless there is a second token. Such a gradient is a sum over channels of a
        difference between sums over channels. With two tokens of weights p and 1 - p, p (1 - p) of it is left, at most
        a quarter.
        """
        two = evaluate(exact, self.inputs(built, 2).change(Tensor.double), attend)
        sizes = {name: largest(two[name]) for name in ("gradient of q", "gradient of k") if name in two}
        roundings = 4 * 2 * built.head_dim
        return {n: roundings * eps * size for n, size in sizes.items() if largest(found[n]) < CANCELLED * size}

    def groupings(self, causal: bool) -> list[bool]:
        """[False, True] where fewer key heads than query heads are possible, else [False]."""
        try:
            self.build(causal, grouped=True)
        except ValueError as error:
            if "heads" not in str(error):
                raise
            return [False]
        return [False, True]

    def inputs(self, mechanism: Mechanism, length: int = LENGTH, batch: int = BATCH, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        D, C = mechanism.head_dim, mechanism.input_dim
        H, G = mechanism.num_heads, mechanism.num_kv_heads
        q, k, v = (torch.randn(batch, h, length, D, generator=generator, dtype=torch.float64) for h in (H, G, G))
        x = torch.randn(batch, length, C, generator=generator, dtype=torch.float64)
        inputs = Inputs(q, k, v, x if self.info.uses_input else None)
        return inputs.change(lambda t: t.to(self.device, self.dtype))


def contract(
    check: Callable[Concatenate[Subject, Options], Iterator[str]],
) -> Callable[Concatenate[str | type[Mechanism] | Subject, Options], list[str]]:
    """Of a generator of the cases that a subject passes: a function that lists them for any mechanism.

    What is broken has the name of the function.
    """

    @wraps(check)
    def listing(
        mechanism: str | type[Mechanism] | Subject, /, *args: Options.args, **options: Options.kwargs
    ) -> list[str]:
        try:
            return list(check(subject_of(mechanism), *args, **options))
        except ContractViolation as violation:
            violation.contract = check.__name__.removeprefix("check_")
            raise

    return listing


def subject_of(
    mechanism: str | type[Mechanism] | Subject,
    declares: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    impls: tuple[str, ...] = (*FORMS, "auto"),
    **options: Any,
) -> Subject:
    """The subject for a registered name or any class, or the given subject; ``declares`` overrides what it declares.

    It is checked on ``device`` in the forms ``impls``; in a ``dtype`` below fp64, which kernels need, against budgets
    of errors.
    """
    if isinstance(mechanism, Subject):
        return mechanism
    if isinstance(mechanism, str):
        info = mechanism_info(mechanism)
        cls = info.cls
    elif isinstance(mechanism, type) and issubclass(mechanism, Mechanism):
        cls = mechanism
        # The defaults are those of register_mechanism.
        unknown = MechanismInfo(cls.__name__, cls, "", 0, True, True, "constant", "linear", False)
        info = replace(getattr(cls, "info", unknown), cls=cls)
    else:
        raise TypeError(f"mechanism must be a registered name or a subclass of Mechanism, got {mechanism!r}")
    return Subject(cls, replace(info, **(declares or {})), options, device, dtype, impls)


def attend(mechanism: Mechanism, inputs: Inputs, **more: Any) -> Results:
    return {"output": mechanism(inputs.q, inputs.k, inputs.v, x=inputs.x, **more)}


def attend_with_state(mechanism: Mechanism, inputs: Inputs, **more: Any) -> Results:
    out = mechanism.with_state(inputs.q, inputs.k, inputs.v, x=inputs.x, **more)
    return {"output": out.output, **named_state(out.state)}


def evaluate(mechanism: Mechanism, inputs: Inputs, call: Call = attend) -> Results:
    """The results of a call, and the gradients of all inputs and parameters for a fixed random weighting of them.

    A gradient that autograd does not give counts as zero here; another contract checks that gradients exist.
    """
    leaves = inputs.change(lambda t: t.detach().clone().requires_grad_())
    results = call(mechanism, leaves)
    wanted = leaves.named | trainable(mechanism)
    smooth = [r for r in results.values() if r.is_floating_point() and r.requires_grad]
    loss = sum(((r * random_like(r)).sum() for r in smooth), torch.zeros((), dtype=torch.float64, requires_grad=True))
    found = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    gradients = {f"gradient of {name}": gradient for name, gradient in zip(wanted, found, strict=True)}
    return {name: r.detach() for name, r in results.items()} | gradients


@torch.no_grad()
def values(mechanism: Mechanism, inputs: Inputs, call: Call = attend) -> Results:
    """Results of a call without gradients."""
    return call(mechanism, inputs)


def trainable(mechanism: Mechanism) -> Results:
    return {name: p for name, p in mechanism.named_parameters() if p.requires_grad}


def random_like(t: Tensor, seed: int = 1) -> Tensor:
    """Standard normal numbers like ``t``, always the same for a shape and seed."""
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(t)


def named_state(state: Any, place: str = "state") -> Results:
    """Copies of the tensors of a state by name, for a state of any structure."""
    if isinstance(state, Tensor):
        return {place: state.clone()}
    parts: Mapping[Any, Any] = state if isinstance(state, Mapping) else {}
    if isinstance(state, tuple | list):
        parts = dict(zip(getattr(state, "_fields", range(len(state))), state, strict=True))
    elif is_dataclass(state):
        parts = {part.name: getattr(state, part.name) for part in fields(state)}
    return {name: t for key, value in parts.items() for name, t in named_state(value, f"{place}.{key}").items()}
