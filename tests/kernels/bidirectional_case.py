"""Inputs of the bidirectional kernels, and how their values and gradients are held against the fp64 specification."""

import pytest
import torch
from torch import Tensor

from kernels.device import DEVICE
from linattn import linear_attention_with_state
from linattn.kernels.bidirectional import config
from linattn.kernels.bidirectional.attend import attend_all
from linattn.ops.shared.types import LinearState

PATHS = ["short", "long", "wide"]
NAMES = ["output", "kv", "k", "dq", "dk", "dv", "d_kv", "d_k"]
on_all_paths = pytest.mark.parametrize("path", PATHS, indirect=True)


def take_path(path: str, patch: pytest.MonkeyPatch) -> None:
    """Makes small shapes take the path of large ones, in several segments."""
    if path != "short":
        patch.setattr(config, "SHORT", -1)
        patch.setattr(config, "TILES_PER_SEGMENT", 1)
    if path == "wide":
        patch.setattr(config, "WIDE", dict.fromkeys(config.WIDE, 0))


def inputs(
    dtype: torch.dtype = torch.float32, B: int = 2, H: int = 2, H_kv: int = 2, Tq: int = 70, Tk: int = 70,
    K: int = 16, V: int = 16, positive: bool = True, state: bool = False, n: int | None = None,
) -> dict:  # fmt: skip
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v = draw(B, H, Tq, K), draw(B, H_kv, Tk, K), draw(B, H_kv, Tk, V) + 0.5
    if positive:
        q, k = q.abs(), k.abs()
    q, k, v = (x.to(dtype).to(DEVICE) for x in (q, k, v))
    n = B if n is None else n
    initial = LinearState(draw(n, H_kv, K, V), draw(n, H_kv, K).abs()) if state else None
    if initial is not None:
        initial = LinearState(*(x.float().to(DEVICE) for x in initial))
    return {"q": q, "k": k, "v": v, "initial": initial}


def seeds_of(q: Tensor, v: Tensor, n: int, H_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    K, V = q.shape[3], v.shape[3]
    shapes = (*q.shape[:3], V), (n, H_kv, K, V), (n, H_kv, K)
    do, d_kv, d_z = (torch.randn(*s, generator=g).to(DEVICE) for s in shapes)
    return do.to(v.dtype), d_kv, d_z


def evaluate(case: dict, how: str, with_state: bool, **options) -> list[Tensor]:
    """Output and state, and the gradients of all inputs through both; ``how`` is kernel, plain or exact."""
    kind = torch.float64 if how == "exact" else None
    leaves = [case[name].detach().to(kind or case[name].dtype) for name in "qkv"]
    start = case["initial"]
    if start is not None:
        leaves += [x.detach().to(kind or x.dtype) for x in start]
    # Strided inputs stay strided: requires_grad_ on detached views.
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v, *rest = leaves
    start = LinearState(*rest) if rest else None
    if how == "kernel":
        output, state = attend_all(
            q, k, v, initial=start, out_dtype=v.dtype, need_state=with_state, eps=1e-6, **options
        )
    else:
        # The plain way to do it in linear time too: its sums cancel where those of the kernels do.
        impl = "reference" if how == "exact" else "chunked"
        output, state = linear_attention_with_state(q, k, v, initial_state=start, impl=impl, validate=False, **options)
    cu = options.get("cu_seqlens")
    n = q.shape[0] if cu is None else len(cu) - 1
    outputs = [output, *state] if with_state else [output]
    seeds = seeds_of(q, v, n, k.shape[1])[: len(outputs)]
    seeds = [s.to(o.dtype) for s, o in zip(seeds, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
    return [x.detach() for x in (*outputs, *grads)]


def check(case: dict, with_state: bool = False, normalizer: str | None = "sum", **options) -> None:
    found, plain, exact = (
        evaluate(case, how, with_state, normalizer=normalizer, **options) for how in ("kernel", "plain", "exact")
    )
    names = [x for x in NAMES if (with_state or x not in ("kv", "k")) and (case["initial"] or "d_" not in x)]
    eps = torch.finfo(case["q"].dtype).eps
    # In fp32 both err by the order of their sums alone: neither bounds the other.
    factor = 4 if case["q"].dtype == torch.float32 else 2
    for name, x, p, e in zip(names, found, plain, exact, strict=True):
        assert x.shape == e.shape
        assert x.dtype == p.dtype
        if e.numel() == 0:
            continue
        error, allowed = (x - e).abs().max().item(), factor * ((p - e).abs().max() + eps * e.abs().max()).item()
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
