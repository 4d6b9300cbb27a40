"""Other libraries, if they can be imported: each in its own layout, with the conversion outside of what is timed.

Their requirements were read in their code. fla's backward must not get a scale of 1 (a kernel specialised to it was
compiled wrongly), so its queries are multiplied by 16 and its scale divides by 16, which is exact in every dtype. fla's
``chunk_simple_gla`` refuses its gated backward on Hopper with this Triton; the fused one stands in for it.
mlstm_kernels takes pre-activations of gates and lengths that its chunk of 128 divides; larger chunks give wrong
gradients. Its backward treats the denominator of an exponential gate as a constant, which is reported as WRONG.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from linattn.lab.bench.kernels import cases as names
from linattn.lab.bench.kernels.bound import Absent, Bound, Contender, Outputs, Tensors
from linattn.lab.bench.kernels.cases import Case
from linattn.lab.bench.kernels.problems import differentiable

SCALE = 1 / 16
CHUNK = 128
MOST_PROGRAMS = 65535
PACKAGES = ("triton", "fla-core", "flash-linear-attention", "mlstm_kernels", "einops")
FLA_SECONDS = 90.0  # it tries dozens of configurations
MLSTM_SECONDS = 60.0
MLSTM_NOTE = "its backward takes the denominator for a constant"

Call = Callable[[Any, Tensors], Tensor | tuple[Tensor, ...]]


def rivals_of(case: Case) -> list[Contender]:
    if case.family == "step":
        return [_fla(names.FLA_STEP, "fla.ops.simple_gla", "fused_recurrent_simple_gla", _call_step)]
    if case.family == "convolution":
        return [_fla(names.FLA_CONVOLUTION, "fla.modules.convolution", "causal_conv1d", _call_convolution)]
    if case.family == "exponential":
        module, function = "mlstm_kernels.torch.chunkwise.triton_xl_chunk", "mlstm_chunkwise__xl_chunk"
        return [_mlstm(names.MLSTM_EXPONENTIAL, module, function, {}, MLSTM_NOTE)]
    if case.family == "sigmoid":
        module, function = "mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging", "mlstm_siging_chunkwise__xl_chunk"
        return [_mlstm(names.MLSTM_SIGMOID, module, function, {"normalize": False}, "")]
    if case.family != "attention" or not case.causal:
        return []
    if case.decay == "none":
        name = names.FLA_NORMALIZED if case.normalized else names.FLA_PLAIN
        call: Call = lambda f, t: f(t["q"], t["k"], t["v"], scale=SCALE, normalize=case.normalized)  # noqa: E731
        return [_fla(name, "fla.ops.linear_attn", "chunk_linear_attn", call)]
    return [_fla(*_DECAYS[case.decay])]


def _call_retention(f: Any, t: Tensors) -> Outputs:
    return f(t["q"], t["k"], t["v"], scale=SCALE)


def _call_gated(f: Any, t: Tensors) -> Outputs:
    return f(t["q"], t["k"], t["v"], g=t["log_decay"], scale=SCALE)


def _call_step(f: Any, t: Tensors) -> Outputs:
    """Without a normaliser, which this library lacks: less work than the others do."""
    output, state = f(t["q"], t["k"], t["v"], scale=SCALE, initial_state=t["kv"], output_final_state=True)
    return output, state


def _call_convolution(f: Any, t: Tensors) -> Outputs:
    return f(t["x"], t["weight"], t["bias"], residual=t["x"])


_DECAYS: dict[str, tuple[str, str, str, Call]] = {
    "head": (names.FLA_HEAD, "fla.ops.retention", "chunk_retention", _call_retention),
    "token": (names.FLA_TOKEN, "fla.ops.simple_gla", "fused_chunk_simple_gla", _call_gated),
    "channel": (names.FLA_CHANNEL, "fla.ops.gla", "chunk_gla", _call_gated),
}


def _fla(name: str, module: str, function: str, call: Call) -> Contender:
    """A contender of fla: layout ``(B, T, H, D)``, gates ``(B, T, H)``; tensors without heads stay as they are."""

    def bind(case: Case, tensors: Tensors) -> Bound:
        f = find(module, function)
        own = {n: _into_fla(case, n, t) for n, t in tensors.items()}

        def run() -> Outputs:
            outputs = call(f, own)
            if case.family == "step":
                return outputs
            return outputs[0] if isinstance(outputs, tuple) else outputs

        def back(n: str, t: Tensor) -> Tensor:
            t = _from_fla(case, n, t)
            if case.family == "step" and n == "output":  # the division that it leaves to others
                row_sum = (tensors["q"].float() * (tensors["z"] + tensors["k"])).sum(-1, keepdim=True)
                t = t / (row_sum + 1e-6)
            return t

        return Bound(differentiable(case, own), run, lambda n, t: _into_fla(case, n, t), back)

    note = "no normaliser" if name == names.FLA_STEP else ""
    # With another number of heads it would try all of its configurations again.
    return Contender(name, bind, "fla", first_seconds=FLA_SECONDS, compiles=True, at_reduced_size=False, note=note)


def _into_fla(case: Case, name: str, t: Tensor) -> Tensor:
    if case.family == "convolution" or name in ("kv", "z") or t.ndim == 1:
        return t.detach().clone()
    t = t.unsqueeze(1) if case.family == "step" else t.transpose(1, 2)
    return (t / SCALE if name == "q" else t).detach().contiguous().clone()


def _from_fla(case: Case, name: str, t: Tensor) -> Tensor:
    if case.family == "convolution" or name.startswith("state"):
        return t
    t = t.squeeze(1) if case.family == "step" else t.transpose(1, 2)
    return t / SCALE if name == "gradient of q" else t


def _mlstm(name: str, module: str, function: str, options: dict[str, Any], note: str) -> Contender:
    """A contender of mlstm_kernels: layout ``(B, H, T, D)``; ``f`` is the forget gate before its log-sigmoid."""

    def bind(case: Case, tensors: Tensors) -> Bound:
        f = find(module, function)
        if case.T % CHUNK or case.B * case.H * case.T // CHUNK > MOST_PROGRAMS:
            raise Absent(f"needs a length that {CHUNK} divides and at most {MOST_PROGRAMS} chunks")
        own = {n: _logit(t) if n == "log_decay" else t.detach().clone() for n, t in tensors.items()}
        arguments = options | {"chunk_size": CHUNK, "autocast_kernel_dtype": own["q"].dtype}

        def run() -> Tensor:
            return f(own["q"], own["k"], own["v"], own["log_input"], own["log_decay"], **arguments)

        def back(n: str, t: Tensor) -> Tensor:  # d log sigmoid(f) = sigmoid(-f) df
            return t / torch.sigmoid(-own["log_decay"]) if n == "gradient of log_decay" else t

        return Bound(own, run, back=back)

    # Every size is a constant of its kernels: for another one all are compiled again.
    return Contender(
        name, bind, "mlstm_kernels", first_seconds=MLSTM_SECONDS, compiles=True, at_reduced_size=False, note=note
    )


def _logit(log_decay: Tensor) -> Tensor:
    """The pre-activation whose log-sigmoid is ``log_decay``."""
    return -torch.log(torch.expm1(-log_decay.detach()))


def find(module: str, function: str) -> Any:
    """Import the function, or raise Absent with the reason; a broken package counts as absent."""
    try:
        return getattr(import_module(module), function)
    except Exception as error:
        raise Absent(f"{module.split('.')[0]} not usable: {type(error).__name__}: {error}") from error


def versions() -> dict[str, str]:
    """Versions of the packages that take part in the race."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
