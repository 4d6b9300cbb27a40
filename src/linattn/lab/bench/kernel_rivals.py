"""The contenders of a case: this library's forms, plain PyTorch eager and compiled, softmax, and other libraries.

Other libraries take part if they can be imported: each in its own layout, with the conversion outside of what is timed.
Their requirements were read in their code. fla's backward must not get a scale of 1 (a kernel specialised to it was
compiled wrongly), so its queries are multiplied by 16 and its scale divides by 16, which is exact in every dtype. fla's
``chunk_simple_gla`` refuses its gated backward on Hopper with this Triton; the fused one stands in for it.
mlstm_kernels takes pre-activations of gates and lengths that its chunk of 128 divides; larger chunks give wrong
gradients. Its backward treats the denominator of an exponential gate as a constant, which is reported as WRONG.
"""

from collections.abc import Callable
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
from linattn.lab.bench.kernel_cases import CHUNKED, COMPILED, CUDNN, EAGER, FLASH, IN_PLACE, OURS, Problem
from linattn.lab.bench.kernel_problems import Bind, Bound, Outputs, Tensors, bind_form, differentiable
from linattn.lab.bench.running import Absent
from linattn.support.compiling import safe_options

RIVALS = ("torch", "softmax", "fla", "mlstm_kernels")
PACKAGES = ("triton", "fla-core", "flash-linear-attention", "mlstm_kernels", "einops")
SCALE, CHUNK, MOST_PROGRAMS = 1 / 16, 128, 65535
MLSTM_NOTE = "its backward takes the denominator for a constant"


@dataclass(frozen=True)
class Contender:
    """One line of the table. ``bind(case, tensors)`` gets tensors in the common layout and may raise Absent."""

    name: str
    bind: Bind
    group: str = "linattn"  # what --rivals names
    softmax: bool = False  # computes another function than the others, for comparison
    first_seconds: float = 20.0  # limit of its first call, which is stopped then
    compiles: bool = False  # its first call is long, but short once another process has compiled it
    at_reduced_size: bool = True  # also checked at reduced size, unless that compiles for minutes once more
    note: str = ""


def make_contenders(case: Problem) -> list[Contender]:
    """This library first, then plain PyTorch, softmax, other libraries."""
    found = [Contender(OURS, bind_kernels, compiles=True)]
    if case.family == "step":
        found.append(Contender(IN_PLACE, partial(bind_kernels, impl="triton in place"), compiles=True))
        found.append(Contender("linattn recurrent", bind_form("recurrent")))
    elif case.mechanism in ("", "relu"):  # of other feature maps the eager version is the chunked form
        found.append(Contender(CHUNKED, bind_form("chunked")))
    if case.family == "mechanism":
        bind = partial(_bind_plain, plain_relu) if case.mechanism == "relu" else bind_form("chunked")
        found += [Contender(EAGER, bind, "torch"), _compiled(bind)]
    elif case.family in ("step", "convolution"):
        found.append(_compiled(partial(_bind_plain, plain_step if case.family == "step" else plain_convolution)))
    if case.family not in ("step", "convolution") and case.mechanism in ("", "relu"):
        found += [_softmax(FLASH, SDPBackend.FLASH_ATTENTION), _softmax(CUDNN, SDPBackend.CUDNN_ATTENTION)]
    return [*found, *other_libraries(case)]


def bind_kernels(case: Problem, tensors: Tensors, impl: str = "triton") -> Bound:
    """Bind kernels by name, and mechanisms by ``auto``, as users get them; unsupported cases raise when called."""
    if impl == "triton in place":
        tensors = tensors | {name: tensors[name].clone() for name in ("kv", "z")}
    by_itself = case.family == "mechanism" and tensors["q"].is_cuda
    bound = bind_form("auto" if by_itself else impl)(case, tensors)
    asked = list[str]()

    def run() -> Outputs:
        try:
            if not by_itself or asked:
                return bound.run()
            with watch_choices() as choices:
                outputs = bound.run()
            others = [str(choice) for choice in choices if choice.impl != "triton"]
            if others or not choices:
                raise Absent(f"auto does not take kernels: {others[0] if others else 'nothing was chosen'}")
            asked.append(str(choices[0]))
            return outputs
        except ValueError as error:
            if "cannot serve this call" in str(error):
                raise Absent(str(error).split("call: ")[1].removesuffix("; use impl='auto'")) from error
            if "impl must be" in str(error):
                raise Absent("there is no kernel for this function yet") from error
            raise

    return Bound(bound.leaves, run)


def _compiled(bind: Bind) -> Contender:
    def compiled(case: Problem, tensors: Tensors) -> Bound:
        torch.compiler.reset()  # beyond eight versions of one function PyTorch would silently stay eager
        bound = bind(case, tensors)
        return Bound(bound.leaves, torch.compile(bound.run, dynamic=False, options=safe_options()))

    return Contender(COMPILED, compiled, "torch", first_seconds=60.0, compiles=True, at_reduced_size=False)


def _bind_plain(plain: Callable[[Problem, Tensors], Outputs], case: Problem, tensors: Tensors) -> Bound:
    own = {name: t.detach() for name, t in tensors.items()}
    return Bound(differentiable(case, own), lambda: plain(case, own))


def plain_relu(case: Problem, t: Tensors) -> Tensor:
    """Two matrix products, as anyone would write it."""
    q, k, v = F.relu(t["q"]), F.relu(t["k"]), t["v"]
    state = torch.einsum("bhtk,bhtv->bhkv", k, v)
    row_sums = torch.einsum("bhtk,bhk->bht", q, k.sum(2))
    return torch.einsum("bhtk,bhkv->bhtv", q, state) / (row_sums.unsqueeze(-1) + 1e-6)


def plain_step(case: Problem, t: Tensors) -> Outputs:
    q, k, v = (t[name].float() for name in ("q", "k", "v"))
    kv, z = t["kv"] + k.unsqueeze(-1) * v.unsqueeze(-2), t["z"] + k
    output = (q.unsqueeze(-1) * kv).sum(-2) / ((q * z).sum(-1, keepdim=True) + 1e-6)
    return output.to(t["v"].dtype), kv, z


def plain_convolution(case: Problem, t: Tensors) -> Tensor:
    """The op of nn.Conv1d."""
    x = t["x"].transpose(1, 2)
    y = F.conv1d(F.pad(x, (case.taps - 1, 0)), t["weight"].unsqueeze(1), t["bias"], groups=case.K)
    return t["x"] + y.transpose(1, 2)


def _softmax(name: str, backend: SDPBackend) -> Contender:
    def bind(case: Problem, tensors: Tensors) -> Bound:
        q, k, v = (tensors[n].detach() for n in ("q", "k", "v"))
        if q.shape[-1] != v.shape[-1] and backend == SDPBackend.FLASH_ATTENTION:
            raise Absent("flash softmax needs values as wide as keys")

        def run() -> Tensor:
            with sdpa_kernel(backend):
                try:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
                except RuntimeError as error:
                    if isinstance(error, torch.OutOfMemoryError) or "No viable backend" not in str(error):
                        raise
                    raise Absent("PyTorch does not offer it for this device, dtype or width") from error

        return Bound({"q": q, "k": k, "v": v}, run)

    return Contender(name, bind, "softmax", softmax=True)


def other_libraries(case: Problem) -> list[Contender]:
    if case.family == "step":  # without a normaliser, which this library lacks: less work than the others do
        call: Call = lambda f, t: f(  # noqa: E731
            t["q"], t["k"], t["v"], scale=SCALE, initial_state=t["kv"], output_final_state=True
        )
        return [_fla(names.FLA_STEP, "fla.ops.simple_gla", "fused_recurrent_simple_gla", call, "no normaliser")]
    if case.family == "convolution":
        call = lambda f, t: f(t["x"], t["weight"], t["bias"], residual=t["x"])  # noqa: E731
        return [_fla(names.FLA_CONVOLUTION, "fla.modules.convolution", "causal_conv1d", call)]
    xl_chunk = "mlstm_kernels.torch.chunkwise.triton_xl_chunk"
    if case.family == "exponential":
        return [_mlstm(names.MLSTM_EXPONENTIAL, xl_chunk, "mlstm_chunkwise__xl_chunk", {}, MLSTM_NOTE)]
    if case.family == "sigmoid":
        function = "mlstm_siging_chunkwise__xl_chunk"
        return [_mlstm(names.MLSTM_SIGMOID, f"{xl_chunk}_siging", function, {"normalize": False}, "")]
    if case.family != "attention" or not case.causal:
        return []
    if case.decay == "none":
        name = names.FLA_NORMALIZED if case.normalized else names.FLA_PLAIN
        call = lambda f, t: f(t["q"], t["k"], t["v"], scale=SCALE, normalize=case.normalized)  # noqa: E731
        return [_fla(name, "fla.ops.linear_attn", "chunk_linear_attn", call)]
    if case.decay == "head":
        call = lambda f, t: f(t["q"], t["k"], t["v"], scale=SCALE)  # noqa: E731
        return [_fla(names.FLA_HEAD, "fla.ops.retention", "chunk_retention", call)]
    call = lambda f, t: f(t["q"], t["k"], t["v"], g=t["log_decay"], scale=SCALE)  # noqa: E731
    if case.decay == "token":
        return [_fla(names.FLA_TOKEN, "fla.ops.simple_gla", "fused_chunk_simple_gla", call)]
    return [_fla(names.FLA_CHANNEL, "fla.ops.gla", "chunk_gla", call)]


Call = Callable[[Any, Tensors], Outputs]


def _fla(name: str, module: str, function: str, call: Call, note: str = "") -> Contender:
    """A contender of fla: layout ``(B, T, H, D)``, gates ``(B, T, H)``; tensors without heads stay as they are."""

    def bind(case: Problem, tensors: Tensors) -> Bound:
        f = find(module, function)
        own = {n: _into_fla(case, n, t) for n, t in tensors.items()}

        def run() -> Outputs:
            outputs = call(f, own)
            return outputs[0] if isinstance(outputs, tuple) and case.family != "step" else outputs

        def back(n: str, t: Tensor) -> Tensor:
            t = _from_fla(case, n, t)
            if case.family == "step" and n == "output":  # the division that it leaves to others
                row_sum = (tensors["q"].float() * (tensors["z"] + tensors["k"])).sum(-1, keepdim=True)
                t = t / (row_sum + 1e-6)
            return t

        return Bound(differentiable(case, own), run, lambda n, t: _into_fla(case, n, t), back)

    # It tries dozens of configurations, and all of them again with another number of heads.
    return Contender(name, bind, "fla", first_seconds=90.0, compiles=True, at_reduced_size=False, note=note)


def _into_fla(case: Problem, name: str, t: Tensor) -> Tensor:
    if case.family == "convolution" or name in ("kv", "z") or t.ndim == 1:
        return t.detach().clone()
    t = t.unsqueeze(1) if case.family == "step" else t.transpose(1, 2)
    return (t / SCALE if name == "q" else t).detach().contiguous().clone()


def _from_fla(case: Problem, name: str, t: Tensor) -> Tensor:
    if case.family == "convolution" or name.startswith("state"):
        return t
    t = t.squeeze(1) if case.family == "step" else t.transpose(1, 2)
    return t / SCALE if name == "gradient of q" else t


def _mlstm(name: str, module: str, function: str, options: dict[str, Any], note: str) -> Contender:
    """A contender of mlstm_kernels: layout ``(B, H, T, D)``; ``f`` is the forget gate before its log-sigmoid."""

    def bind(case: Problem, tensors: Tensors) -> Bound:
        f = find(module, function)
        if case.T % CHUNK or case.B * case.H * case.T // CHUNK > MOST_PROGRAMS:
            raise Absent(f"needs a length that {CHUNK} divides and at most {MOST_PROGRAMS} chunks")
        own = {n: t.detach().clone() for n, t in tensors.items()}
        own["log_decay"] = -torch.log(torch.expm1(-own["log_decay"]))  # whose log-sigmoid it is
        arguments = options | {"chunk_size": CHUNK, "autocast_kernel_dtype": own["q"].dtype}

        def run() -> Tensor:
            return f(own["q"], own["k"], own["v"], own["log_input"], own["log_decay"], **arguments)

        def back(n: str, t: Tensor) -> Tensor:  # d log sigmoid(f) = sigmoid(-f) df
            return t / torch.sigmoid(-own["log_decay"]) if n == "gradient of log_decay" else t

        return Bound(own, run, back=back)

    # Every size is a constant of its kernels: for another one all are compiled again.
    return Contender(name, bind, "mlstm_kernels", first_seconds=60.0, compiles=True, at_reduced_size=False, note=note)


def find(module: str, function: str) -> Any:
    """Import the function, or raise Absent with the reason; a broken package counts as absent."""
    try:
        return getattr(import_module(module), function)
    except Exception as error:
        raise Absent(f"{module.split('.')[0]} not usable: {type(error).__name__}: {error}") from error
