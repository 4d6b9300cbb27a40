"""The contenders of a case: this library's forms, plain PyTorch eager and compiled, softmax, and rivals."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench.choices import watch_choices
from linattn.lab.bench.kernels.bound import Absent, Bound, Contender, Outputs, Tensors
from linattn.lab.bench.kernels.cases import CHUNKED, COMPILED, CUDNN, EAGER, FLASH, IN_PLACE, OURS, Case
from linattn.lab.bench.kernels.problems import bind_form, differentiable
from linattn.lab.bench.kernels.rivals import rivals_of
from linattn.support.compiling import safe_options

COMPILE_SECONDS = 60.0
RIVALS = ("torch", "softmax", "fla", "mlstm_kernels")
Plain = Callable[[Case, Tensors], Outputs]


def make_contenders(case: Case, rivals: tuple[str, ...] = RIVALS) -> list[Contender]:
    """This library first, then the groups that ``rivals`` names: plain PyTorch, softmax, other libraries."""
    found = [Contender(OURS, bind_kernels, compiles=True), *_forms(case)]
    if case.family == "mechanism":
        found += _plain_mechanism(case)
    elif case.family in ("step", "convolution"):
        plain = plain_step if case.family == "step" else plain_convolution
        found.append(_compiled(partial(_bind_plain, plain)))
    if case.family not in ("step", "convolution") and case.mechanism in ("", "relu"):
        found += [_softmax(FLASH, SDPBackend.FLASH_ATTENTION), _softmax(CUDNN, SDPBackend.CUDNN_ATTENTION)]
    return [c for c in (*found, *rivals_of(case)) if c.ours or c.group in rivals]


def _forms(case: Case) -> list[Contender]:
    if case.family == "step":
        in_place = Contender(IN_PLACE, partial(bind_kernels, impl="triton in place"), compiles=True)
        return [in_place, Contender("linattn recurrent", bind_form("recurrent"))]
    if case.mechanism and case.mechanism != "relu":
        return []  # with its own feature map the eager version is the chunked form
    return [Contender(CHUNKED, bind_form("chunked"))]


def bind_kernels(case: Case, tensors: Tensors, impl: str = "triton") -> Bound:
    """Bind kernels by name, and mechanisms by ``auto``, as users get them; unsupported cases raise when called."""
    if impl == "triton in place":
        tensors = tensors | {name: tensors[name].clone() for name in ("kv", "z")}
    by_itself = case.family == "mechanism" and tensors["q"].is_cuda
    bound = bind_form("auto" if by_itself else impl)(case, tensors)
    asked = list[str]()

    def run() -> Outputs:
        try:
            if by_itself and not asked:
                with watch_choices() as choices:
                    outputs = bound.run()
                others = [str(choice) for choice in choices if choice.impl != "triton"]
                if others or not choices:
                    raise Absent(f"auto does not take kernels: {others[0] if others else 'nothing was chosen'}")
                asked.append(str(choices[0]))
                return outputs
            return bound.run()
        except ValueError as error:
            if "cannot serve this call" in str(error):
                raise Absent(str(error).split("call: ")[1].removesuffix("; use impl='auto'")) from error
            if "impl must be" in str(error):
                raise Absent("there is no kernel for this function yet") from error
            raise

    return Bound(bound.leaves, run)


def _plain_mechanism(case: Case) -> list[Contender]:
    """ReLU attention as anyone would write it; other feature maps by the mechanism's own form in PyTorch."""
    bind = partial(_bind_plain, plain_relu) if case.mechanism == "relu" else bind_form("chunked")
    return [Contender(EAGER, bind, "torch"), _compiled(bind)]


def _compiled(bind: Callable[[Case, Tensors], Bound]) -> Contender:
    def compiled(case: Case, tensors: Tensors) -> Bound:
        torch.compiler.reset()  # beyond eight versions of one function PyTorch would silently stay eager
        bound = bind(case, tensors)
        return Bound(bound.leaves, torch.compile(bound.run, dynamic=False, options=safe_options()))

    return Contender(
        COMPILED, compiled, "torch", first_seconds=COMPILE_SECONDS, compiles=True, at_reduced_size=False
    )  # fmt: skip


def _bind_plain(plain: Plain, case: Case, tensors: Tensors) -> Bound:
    own = {name: t.detach() for name, t in tensors.items()}
    return Bound(differentiable(case, own), lambda: plain(case, own))


def plain_relu(case: Case, t: Tensors) -> Tensor:
    """Two matrix products, as anyone would write it."""
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
    """The op of nn.Conv1d."""
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

    return Contender(name, bind, "softmax", softmax=True)


def bind_exact_softmax(case: Case, tensors: Tensors) -> Bound:
    """Bind softmax attention as it is defined, in the dtype of its inputs."""
    q, k, v = (tensors[n].detach() for n in ("q", "k", "v"))

    def run() -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if case.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return scores.softmax(-1) @ v

    return Bound({"q": q, "k": k, "v": v}, run)
