"""Who runs in a case: the forms of this library, plain PyTorch eager and compiled, softmax as context, and rivals."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.bench.kernels.bound import Absent, Bound, Contender, Outputs, Tensors
from linattn.bench.kernels.cases import CHUNKED, COMPILED, CUDNN, EAGER, FLASH, OURS, Case
from linattn.bench.kernels.problems import bind_form, differentiable
from linattn.bench.kernels.rivals import rivals_of

COMPILE_SECONDS = 20.0
Plain = Callable[[Case, Tensors], Outputs]


def make_contenders(case: Case, rivals: bool = True) -> list[Contender]:
    """This library first: a run that ends early has its rows."""
    found = [Contender(OURS, _bind_kernels("triton")), *_forms(case)]
    if case.family == "mechanism":
        found += _plain_mechanism(case)
    elif case.family in ("step", "convolution"):
        plain = plain_step if case.family == "step" else plain_convolution
        found.append(_compiled(partial(_bind_plain, plain)))
    if rivals and case.family != "convolution" and case.family != "step" and case.mechanism in ("", "relu"):
        found += [_softmax(FLASH, SDPBackend.FLASH_ATTENTION), _softmax(CUDNN, SDPBackend.CUDNN_ATTENTION)]
    return found + (rivals_of(case) if rivals else [])


def _forms(case: Case) -> list[Contender]:
    if case.family == "step":
        in_place = Contender("linattn triton, in place", _bind_kernels("triton in place", own_state=True))
        return [in_place, Contender("linattn recurrent", bind_form("recurrent"))]
    if case.mechanism and case.mechanism != "relu":
        return []  # with a map of its own, the chunked form is what eager is
    return [Contender(CHUNKED, bind_form("chunked"))]


def _bind_kernels(impl: str, own_state: bool = False) -> Callable[[Case, Tensors], Bound]:
    """Kernels that do not serve a case say why, when they are called."""

    def bind(case: Case, tensors: Tensors) -> Bound:
        if own_state:
            tensors = tensors | {name: tensors[name].clone() for name in ("kv", "z")}
        bound = bind_form(impl)(case, tensors)

        def run() -> Outputs:
            try:
                return bound.run()
            except ValueError as error:
                if "cannot serve this call" in str(error):
                    raise Absent(str(error).split("call: ")[1].removesuffix("; use impl='auto'")) from error
                if "impl must be" in str(error):
                    raise Absent("there is no kernel for this function yet") from error
                raise

        return Bound(bound.leaves, run)

    return bind


def _plain_mechanism(case: Case) -> list[Contender]:
    if case.mechanism == "relu":
        bind = partial(_bind_plain, plain_relu)
        return [Contender(EAGER, bind), _compiled(bind)]
    eager = bind_form("chunked")
    # One length tells what compiling a map brings; each more would take half a minute.
    return [Contender(EAGER, eager), *([_compiled(eager)] if case.T <= 196 else [])]


def _compiled(bind: Callable[[Case, Tensors], Bound]) -> Contender:
    def compiled(case: Case, tensors: Tensors) -> Bound:
        torch.compiler.reset()  # beyond eight versions of one function PyTorch would quietly stay eager
        bound = bind(case, tensors)
        return Bound(bound.leaves, torch.compile(bound.run, dynamic=False))

    return Contender(COMPILED, compiled, cold_seconds=COMPILE_SECONDS, at_reduced_size=False)


def _bind_plain(plain: Plain, case: Case, tensors: Tensors) -> Bound:
    own = {name: t.detach() for name, t in tensors.items()}
    return Bound(differentiable(case, own), lambda: plain(case, own))


def plain_relu(case: Case, t: Tensors) -> Tensor:
    """Two products, as anyone would write it."""
    q, k, v = F.relu(t["q"]), F.relu(t["k"]), t["v"]
    state = torch.einsum("bhtk,bhtv->bhkv", k, v)
    row_sums = torch.einsum("bhtk,bhk->bht", q, k.sum(2))
    return torch.einsum("bhtk,bhkv->bhtv", q, state) / (row_sums.unsqueeze(-1) + 1e-6)


def plain_step(case: Case, t: Tensors) -> Outputs:
    q, k, v = (t[name].float() for name in ("q", "k", "v"))
    kv, z = t["kv"] + k.unsqueeze(-1) * v.unsqueeze(-2), t["z"] + k
    output = (q.unsqueeze(-1) * kv).sum(-2) / ((q * z).sum(-1, keepdim=True) + 1e-6)
    return output.to(t["v"].dtype), kv, z


def plain_convolution(case: Case, t: Tensors) -> Tensor:
    """With nn.Conv1d's own op."""
    x = t["x"].transpose(1, 2)
    y = F.conv1d(F.pad(x, (case.taps - 1, 0)), t["weight"].unsqueeze(1), t["bias"], groups=case.K)
    return t["x"] + y.transpose(1, 2)


def _softmax(name: str, backend: SDPBackend) -> Contender:
    def bind(case: Case, tensors: Tensors) -> Bound:
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

    return Contender(name, bind, softmax=True)


def bind_exact_softmax(case: Case, tensors: Tensors) -> Bound:
    """Softmax attention by its definition, in the dtype of its inputs."""
    q, k, v = (tensors[n].detach() for n in ("q", "k", "v"))

    def run() -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if case.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return scores.softmax(-1) @ v

    return Bound({"q": q, "k": k, "v": v}, run)
