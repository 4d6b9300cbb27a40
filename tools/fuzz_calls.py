"""Runs the calls of fuzz_cases.py: kernels against fp64, within what rounding costs plain PyTorch.

Inputs, budgets and poisoned memory are those of the tests, whose folder must be on the path.
"""

import random
import re
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_cases import EXPONENTIAL, WITH_TABLES, Case
from torch import Tensor

from kernels.budget import ROUNDINGS, assert_within, error
from linattn import (
    exponential_attention,
    exponential_attention_with_state,
    linear_attention,
    linear_attention_with_state,
)
from linattn.ops import maps
from linattn.ops.convolution.api import short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.exponential.call import ExponentialState
from linattn.ops.hybrid.types import SalientBudget
from linattn.ops.shared.types import LinearState
from linattn.testing.cases import random_like
from linattn.testing.poison import poisoned_allocations
from ops.hybrid_cases import call as hybrid

Tensors = dict[str, Tensor]
REFUSED = re.compile("impl='triton' cannot serve this call: (.*); use impl='auto'")
# Weights that the definition may hold; in fp64 the chunked form is as good where there are more.
MOST_WEIGHTS = 2**24


def refusal(problem: Exception) -> str | None:
    """Why kernels do not serve a call, of the error that says so; None: it is another one."""
    found = REFUSED.search(str(problem)) if isinstance(problem, ValueError) else None
    return found and found.group(1)


def need(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --device cpu runs tiny cases in Triton's interpreter")


def lost_gpu() -> bool:
    """Whether nothing can be run on the GPU any more, as after an illegal access to memory."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def check(case: Case, device: str) -> list[str]:
    """What is wrong with the kernels' results, a line each."""
    tensors, options = draw(case, device)
    with poisoned_allocations():
        found = evaluate(case, tensors, options, "triton")
    eps = max(ROUNDINGS, torch.finfo(getattr(torch, case.dtype)).eps)
    weights = case.B * case.H * case.T * case.Tk * (case.features if case.decay else 1)
    spec = "reference" if weights <= MOST_WEIGHTS else "chunked"
    exact = evaluate(case, {name: x.double() for name, x in tensors.items()}, options, spec)
    plain = [evaluate(case, tensors, options, form) for form in dict.fromkeys((spec, "chunked"))]
    for seed in (3, 4):
        moved = {name: x.double() * (1 + eps * random_like(x.double(), seed)) for name, x in tensors.items()}
        plain.append(evaluate(case, moved, options, spec))
    # Along a sequence what rounding leaves of a decay's gradient adds up, over all of them for one decay a head.
    summed = (case.T * (case.B if case.decay == "head" else 1)) ** 0.5
    rests = _through_a_division(exact, plain, eps) if case.divided else {}
    rests |= {"d log_decay": ROUNDINGS * _before_cancelling(tensors, exact)} if "log_decay" in tensors else {}
    if case.map in ("squares", "squares_and_linear"):  # two numbers for all tokens, and no others tell of their errors
        tokens = exact["output"].shape[:3].numel()
        rests |= {name: tokens**0.5 * eps * exact[name].abs().max().item() for name in ("d a", "d b")}
    wrong = []
    for name, value in exact.items():
        if found[name].dtype != plain[0][name].dtype:
            wrong.append(f"{name} is {found[name].dtype}, plain PyTorch gives {plain[0][name].dtype}")
        if plain[0][name].isfinite().all() and not found[name].isfinite().all():
            wrong.append(f"{name} has {int((~found[name].isfinite()).sum())} of {value.numel()} numbers not finite")
            continue
        try:
            one = ({name: results[name]} for results in (found, exact, *plain))
            assert_within(*one, summed=summed, inputs=getattr(torch, case.dtype), rests=rests)
        except AssertionError as problem:
            said = problem.args[0]
            numbers = f"error {said[1]:.2g}, allowed {said[2]:.2g}" if isinstance(said, tuple) else "another shape"
            wrong.append(f"{name}: {numbers}, largest {value.abs().max().item():.2g}")
    return wrong


def _through_a_division(exact: Tensors, plain: list[Tensors], eps: float) -> dict[str, float]:
    """Such gradients are rests of larger numbers, do . v less its mean: twice the budget of others."""
    names = exact.keys() & {"d q", "d k", "d a", "d b", "d size_k"}
    costs = {name: max(error(other[name], exact[name]) for other in plain) for name in names}
    return {name: 2 * cost + eps * exact[name].abs().max().item() for name, cost in costs.items()}


def _before_cancelling(t: Tensors, exact: Tensors) -> float:
    """The gradient of a decay is a rest of q . dq and k . dk."""
    sizes = ((t[name].double() * exact[f"d {name}"]).nan_to_num().sum(-1) for name in "qk")
    return sum(x.abs().max().item() for x in sizes)


def evaluate(c: Case, tensors: Tensors, options: dict[str, Any], impl: str) -> Tensors:
    """Results, and the gradients of all tensors; what masked queries give carries no meaning."""
    t = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    results = call(c, t, {**options, "impl": impl})
    mask = options.get("key_mask")
    if mask is not None and c.Tk == c.T:
        hidden = ~(mask[..., None] if c.kind == "convolution" else mask[:, None, :, None])
        results["output"] = results["output"].masked_fill(hidden, 0)
    dtype, loss = getattr(torch, c.dtype), 0.0
    for x in results.values():
        loss = loss + (x.double() * random_like(x.double()).to(dtype).double()).sum()
    gradients = torch.autograd.grad(loss, list(t.values()), materialize_grads=True, allow_unused=True)
    found = {name: x.detach() for name, x in results.items()}
    return found | {f"d {name}": x for name, x in zip(t, gradients, strict=True)}


def call(c: Case, t: Tensors, options: dict[str, Any]) -> Tensors:
    if c.kind == "convolution":
        start = ConvolutionState(t["start"]) if c.initial else None
        output, (last,) = short_convolution_with_state(
            t["x"], t["weight"], t["bias"], initial_state=start, residual=c.projected,
            activation="silu" if c.weighed else None, **options,
        )  # fmt: skip
        return {"output": output, "last": last}
    if c.kind == "hybrid":
        known = {"features": (t["phi"], t["psi"]), "window": c.window, **options}
        known |= {"layout": "sliding" if c.layout == "sliding" else "chunks", "delay": c.H_kv - 1}
        known |= {"budget": SalientBudget(1 / 8, c.window, cap=5, sinks=2)} if c.layout == "budget" else {}
        given = {name: t[name] for name in ("q", "k", "v", "gate") if name in t}
        if not c.final:
            return {"output": hybrid(given, **known)}
        output, state = hybrid(given, True, **known)
        return {"output": output, "kv": state.linear.kv}
    qkv = t["q"], t["k"], t["v"]
    options |= {name: t[name] for name in ("log_decay", "log_input") if name in t}
    if c.kind in EXPONENTIAL:
        if not c.final:
            return {"output": exponential_attention(*qkv, **options)}
        start = ExponentialState(t["kv"], t["z"], t["unit"]) if c.initial else None
        output, (kv, z, unit) = exponential_attention_with_state(*qkv, initial_state=start, **options)
        return {"output": output, "kv": kv, "z": z, "unit": unit.clamp(min=-1e3)}  # -inf of an empty sequence
    options |= {"causal": c.kind not in ("bidirectional", "lion"), "normalizer": c.norm, "decay_index": c.index}
    options |= {"feature_map": feature_map(c, t), "norm_features": (t["phi"], t["psi"]) if c.own_norm else None}
    if not c.final:
        return {"output": linear_attention(*qkv, **options)}
    start = LinearState(t["kv"], t["z"]) if c.initial else None
    output, (kv, z) = linear_attention_with_state(*qkv, initial_state=start, **options)
    return {"output": output, "kv": kv, "z": z}


def feature_map(c: Case, t: Tensors) -> Any:
    """A map, or one of the queries and one of the keys; numbers that are learnt come from the tensors."""
    plain = {None: None, "relu": maps.Relu(), "elu": maps.EluPlusOne(), "softmax_pair": maps.SoftmaxPair()}
    plain |= {"unit_silu": maps.UnitSilu()}
    if c.map in plain:
        return plain[c.map]
    if c.map == "norm_power":
        power, tau = t["v"].new_tensor([1.5, 0.5], dtype=torch.promote_types(t["v"].dtype, torch.float32))
        return maps.NormPower(power, tau, c.K), maps.SignPower(power, c.K)
    a, b = t["a"], t["b"]
    if c.map == "pair_relu":
        return maps.PairRelu(a[None], b[None] - 0.8)
    if c.map == "split_power":
        return maps.SplitPower(1 + a, b), maps.SplitPower(1 + a, b, opposite=True)
    if c.map == "split_expm1":
        same = 0.4 * torch.cat([a, b], -1)
        return maps.SplitExpm1(same), maps.SplitExpm1(same, opposite=True)
    if c.map == "shifted_power":
        # A factor of a whole query has no gradient under a normaliser but what rounding leaves.
        sizes = t["size_q"].detach() if c.norm else t["size_q"], t["size_k"]
        return tuple(maps.ShiftedPower(3.0, a, size[:, None], size[:, None]) for size in sizes)
    return maps.Squares(a[0, 0], None if c.map == "squares" else 0.1 * b[0, 0], b[0, 1], c.K)


def draw(c: Case, device: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors that get gradients, and the options that get none."""
    g = torch.Generator().manual_seed(random.Random(c.name).getrandbits(40))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    t, options = (_of_convolution if c.kind == "convolution" else _of_attention)(c, noise), {}
    if c.mask is not None:
        first, place = (0.2 + 0.6 * noise(c.B, 1).sigmoid()) * c.Tk, torch.arange(c.Tk)
        real = {"holes": noise(c.B, c.Tk) > -0.5, "left": place >= first, "right": place <= first}[c.mask]
        for name in t.keys() & {"k", "v", "x"}:  # what padding holds does not matter
            hidden = ~(real[..., None] if name == "x" else real[:, None, :, None])
            t[name] = t[name].masked_fill(hidden, torch.nan)
        options["key_mask"] = real.to(device)
    if c.cuts is not None:
        options["cu_seqlens"] = torch.tensor(c.cuts, device=device)
    if c.kind == "hybrid" and c.layout == "budget":
        options["scores"] = noise(c.B, c.H_kv, c.T).round().to(device)
    of_heads = {"q", "k", "v", "phi", "psi", "gate"}
    for name in t.keys() & {*of_heads, "x", "weight", "bias", "start"}:
        t[name] = t[name].to(getattr(torch, c.dtype))
        if c.projected and name in of_heads:
            t[name] = t[name].transpose(1, 2).contiguous().transpose(1, 2)
    return {name: x.to(device) for name, x in t.items()}, options


def _of_convolution(c: Case, noise: Any) -> Tensors:
    t = {"x": noise(c.B, c.T, c.K + c.V), "weight": noise(c.K + c.V, c.window), "bias": noise(c.K + c.V)}
    return t | ({"start": noise(c.sequences, c.window - 1, c.K + c.V)} if c.initial else {})


def _of_attention(c: Case, noise: Any) -> Tensors:
    t = {"q": noise(c.B, c.H, c.T, c.K), "k": noise(c.B, c.H_kv, c.Tk, c.K), "v": noise(c.B, c.H_kv, c.Tk, c.V) + 0.5}
    if c.kind in EXPONENTIAL or (c.norm and c.map is None):  # row sums are far from 0
        t["q"], t["k"] = t["q"].abs(), t["k"].abs() + 0.3
    if c.norm == "abs_max_one":  # and from 1 on both sides: the gradient jumps there
        t["q"] *= torch.where(noise(c.B, c.H, c.T, 1) > 0.5, 1e-6, 1.0)
    if c.kind == "hybrid" and c.weighed:
        t["gate"] = noise(c.B, c.H, c.T, c.V).sigmoid()
    if c.own_norm or c.kind == "hybrid":
        t |= {"phi": noise(c.B, c.H, c.T, c.K).abs() + 0.1, "psi": noise(c.B, c.H_kv, c.Tk, c.K).abs() + 0.1}
    if c.decay:
        shape = {"head": (c.H_kv,), "token": (c.B, c.H_kv, c.T), "channel": (c.B, c.H_kv, c.T, c.features)}[c.decay]
        t["log_decay"] = F.logsigmoid(noise(*shape) + c.gate)
    if c.kind in EXPONENTIAL or (c.weighed and c.kind != "hybrid"):
        t["log_input"] = noise(c.B, c.H_kv, c.Tk)
    if c.map in WITH_TABLES:
        t |= {name: 0.3 + noise(c.H_kv, c.K).abs().clamp(max=1.5) for name in "ab"}
    if c.map == "shifted_power":
        t |= {name: 0.5 + noise(c.B, T).sigmoid() for name, T in (("size_q", c.T), ("size_k", c.Tk))}
    if c.initial:
        heads = c.sequences, c.H_kv * c.flows
        t["z"] = noise(*heads, c.features).abs() + 0.3
        t["kv"] = noise(*heads, c.features, c.V // c.flows) * t["z"][..., None]
        t |= {"unit": noise(*heads)} if c.kind in EXPONENTIAL else {}
    return t
