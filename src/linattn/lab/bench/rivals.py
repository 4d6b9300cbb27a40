"""The contenders of a case: this library's forms, plain PyTorch eager and compiled, softmax, and other libraries.

Other libraries take part if they can be imported: each in its own layout, with the conversion outside of what is timed.
Their requirements were read in their code. fla's backward must not get a scale of 1 (a kernel specialised to it was
compiled wrongly), so its queries are multiplied by 16 and its scale divides by 16, which is exact in every dtype. fla's
``chunk_simple_gla`` refuses its gated backward on Hopper with this Triton; the fused one stands in for it.
mlstm_kernels takes pre-activations of gates and lengths that its chunk of 128 divides; larger chunks give wrong
gradients. Its backward treats the denominator of an exponential gate as a constant, which is reported as WRONG.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench import kernel_cases as names
from linattn.lab.bench.check import watch_choices
from linattn.lab.bench.kernel_cases import CHUNKED, COMPILED, EAGER, FLASH, OURS
from linattn.lab.bench.problems import Bind, Bound, Outputs, Problem, Tensors, bind_form, bind_softmax, differentiable
from linattn.lab.bench.timing import Unmeasured
from linattn.support.compiling import safe_options

PACKAGES = ("triton", "fla-core", "flash-linear-attention", "mlstm_kernels", "einops")
SCALE, CHUNK, MOST_PROGRAMS = 1 / 16, 128, 65535


@dataclass(frozen=True)
class Contender:
    """One line of the table. ``bind(case, tensors)`` gets tensors in the common layout."""

    name: str
    bind: Bind
    softmax: bool = False  # computes another function than the others, for comparison
    note: str = ""


def make_contenders(case: Problem) -> list[Contender]:
    """This library first, then plain PyTorch, softmax, other libraries."""
    found = [Contender(OURS, bind_kernels)]
    one_function = case.mechanism in ("", "relu")  # of other feature maps the eager version is the chunked form
    if case.family == "step":
        found.append(Contender("linattn recurrent", bind_form("recurrent")))
    elif one_function:
        found.append(Contender(CHUNKED, bind_form("chunked")))
    if case.family == "mechanism":
        bind = bind_plain_relu if case.mechanism == "relu" else bind_form("chunked")
        found += [Contender(EAGER, bind), Contender(COMPILED, _compiled(bind))]
    if case.family not in ("step", "convolution") and one_function:
        found.append(Contender(FLASH, bind_flash, softmax=True))
    return [*found, *other_libraries(case)]


def bind_kernels(case: Problem, tensors: Tensors) -> Bound:
    """Bind kernels by name, and mechanisms by ``auto``, as users get them, after a first call."""
    by_itself = case.family == "mechanism" and tensors["q"].is_cuda
    bound = bind_form("auto" if by_itself else "triton")(case, tensors)
    try:
        with watch_choices() as choices:
            bound.call(None)()
    except ValueError as error:
        if "cannot serve this call" in str(error) or "impl must be" in str(error):
            raise Unmeasured("absent", str(error)) from error
        raise
    others = [str(choice) for choice in choices if choice.impl != "triton"]
    if by_itself and (others or not choices):
        raise Unmeasured("absent", f"auto does not take kernels: {', '.join(others)}")
    return bound


def _compiled(bind: Bind) -> Bind:
    def compiled(case: Problem, tensors: Tensors) -> Bound:
        torch.compiler.reset()  # beyond eight versions of one function PyTorch would silently stay eager
        bound = bind(case, tensors)
        return Bound(bound.leaves, torch.compile(bound.run, dynamic=False, options=safe_options()))

    return compiled


def bind_plain_relu(case: Problem, tensors: Tensors) -> Bound:
    """Two matrix products, as anyone would write it."""
    own = {name: t.detach() for name, t in tensors.items()}

    def run() -> Tensor:
        q, k, v = F.relu(own["q"]), F.relu(own["k"]), own["v"]
        state = torch.einsum("bhtk,bhtv->bhkv", k, v)
        row_sums = torch.einsum("bhtk,bhk->bht", q, k.sum(2))
        return torch.einsum("bhtk,bhkv->bhtv", q, state) / (row_sums.unsqueeze(-1) + 1e-6)

    return Bound(own, run)


def bind_flash(case: Problem, tensors: Tensors) -> Bound:
    bound = bind_softmax(case, tensors)

    def run() -> Outputs:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            try:
                return bound.run()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or "No viable backend" not in str(error):
                    raise
                raise Unmeasured("absent", "PyTorch does not offer it for this device, dtype or width") from error

    return Bound(bound.leaves, run)


# Of attention by its decay, and of other families: the contender, whose name is that of the function, and its module.
FLA = {
    "none": (names.FLA_PLAIN, "ops.linear_attn"), "head": (names.FLA_HEAD, "ops.retention"),
    "token": (names.FLA_TOKEN, "ops.simple_gla"), "channel": (names.FLA_CHANNEL, "ops.gla"),
    "step": (names.FLA_STEP, "ops.simple_gla"), "convolution": (names.FLA_CONVOLUTION, "modules.convolution"),
}  # fmt: skip


def other_libraries(case: Problem) -> list[Contender]:
    xl_chunk = "mlstm_kernels.torch.chunkwise.triton_xl_chunk"
    if case.family == "exponential":
        note = "its backward takes the denominator for a constant"
        return [_mlstm(names.MLSTM_EXPONENTIAL, xl_chunk, "mlstm_chunkwise__xl_chunk", {}, note)]
    if case.family == "sigmoid":
        function = "mlstm_siging_chunkwise__xl_chunk"
        return [_mlstm(names.MLSTM_SIGMOID, f"{xl_chunk}_siging", function, {"normalize": False}, "")]
    if case.family == "mechanism" or not case.causal:
        return []
    name, module = FLA[case.decay if case.family == "attention" else case.family]
    function = name.removeprefix("fla ")
    if case.family == "attention" and name == names.FLA_PLAIN and case.normalized:
        name = names.FLA_NORMALIZED
    # A step without a normaliser, which this library lacks: less work than the others do.
    note = "no normaliser" if case.family == "step" else ""
    return [Contender(name, partial(_bind_fla, module=f"fla.{module}", function=function), note=note)]


def _bind_fla(case: Problem, tensors: Tensors, module: str, function: str) -> Bound:
    """fla's layout is ``(B, T, H, D)``, gates ``(B, T, H)``; tensors without heads stay as they are."""
    f, step, plain = find(module, function), case.family == "step", case.family == "convolution"

    def into(n: str, t: Tensor) -> Tensor:
        if plain or n in ("kv", "z") or t.ndim == 1:
            return t.detach().clone()
        t = t.unsqueeze(1) if step else t.transpose(1, 2)
        return (t / SCALE if n == "q" else t).detach().contiguous().clone()

    def back(n: str, t: Tensor) -> Tensor:
        if plain or n.startswith("state"):
            return t
        t = t.squeeze(1) if step else t.transpose(1, 2)
        if step:  # the division that it leaves to others
            t = t / ((tensors["q"].float() * (tensors["z"] + tensors["k"])).sum(-1, keepdim=True) + 1e-6)
        return t / SCALE if n == "gradient of q" else t

    own = {n: into(n, t) for n, t in tensors.items()}

    arguments = [own[n] for n in (("x", "weight", "bias") if plain else ("q", "k", "v"))]
    options: dict[str, Any] = {"residual": own["x"]} if plain else {"scale": SCALE}
    if step:
        options |= {"initial_state": own["kv"], "output_final_state": True}
    elif case.decay in ("token", "channel"):
        options["g"] = own["log_decay"]
    elif case.decay == "none" and not plain:
        options["normalize"] = case.normalized

    def run() -> Outputs:
        found: Outputs = f(*arguments, **options)
        return found[0] if isinstance(found, tuple) and not step else found

    return Bound(differentiable(case, own), run, into, back)


def _mlstm(name: str, module: str, function: str, options: dict[str, Any], note: str) -> Contender:
    """A contender of mlstm_kernels: layout ``(B, H, T, D)``; ``f`` is the forget gate before its log-sigmoid."""

    def bind(case: Problem, tensors: Tensors) -> Bound:
        f = find(module, function)
        if case.T % CHUNK or case.B * case.H * case.T // CHUNK > MOST_PROGRAMS:
            raise Unmeasured("absent", f"needs a length that {CHUNK} divides and at most {MOST_PROGRAMS} chunks")
        own = {n: t.detach().clone() for n, t in tensors.items()}
        own["log_decay"] = -torch.log(torch.expm1(-own["log_decay"]))  # whose log-sigmoid it is
        arguments = options | {"chunk_size": CHUNK, "autocast_kernel_dtype": own["q"].dtype}

        def run() -> Tensor:
            return f(own["q"], own["k"], own["v"], own["log_input"], own["log_decay"], **arguments)

        def back(n: str, t: Tensor) -> Tensor:  # d log sigmoid(f) = sigmoid(-f) df
            return t / torch.sigmoid(-own["log_decay"]) if n == "gradient of log_decay" else t

        return Bound(own, run, back=back)

    return Contender(name, bind, note=note)


def find(module: str, function: str) -> Any:
    """Import the function; where that fails for whatever reason, the package counts as absent."""
    try:
        return getattr(import_module(module), function)
    except Exception as error:
        reason = f"{module.split('.')[0]} not usable: {type(error).__name__}: {error}"
        raise Unmeasured("absent", reason) from error
