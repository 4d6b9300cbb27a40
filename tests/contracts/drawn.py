"""Calls of ``linear_attention`` drawn by hypothesis: shapes that no list of examples would think of."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from linattn.ops.maps import EluPlusOne

LONGEST = 140  # two chunk boundaries of 64

Arguments = dict[str, Any]


@st.composite
def calls(draw: st.DrawFn, *, causal: bool | None = None, length: int | None = None, batch: int | None = None):
    """Arguments of ``linear_attention``: q, k, v and options; widths of keys and values differ."""
    B = draw(st.integers(1, 2)) if batch is None else batch
    H_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    K, V = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    Tk = draw(st.integers(1, LONGEST)) if length is None else length
    causal = draw(st.booleans()) if causal is None else causal
    decay = draw(st.sampled_from(["none", "head", "token", "channel"]))
    free = not causal and decay == "none" and length is None
    Tq = draw(st.integers(1, LONGEST)) if free else Tk
    normalizer = draw(st.sampled_from(["sum", "abs_max_one", None]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # Strong and weak decays: from forgetting within a token to nearly none.
    strength = draw(st.sampled_from([0.01, 1.0, 30.0]))
    shapes = {"none": None, "head": (H_kv,), "token": (B, H_kv, Tk), "channel": (B, H_kv, Tk, K)}
    shape = shapes[decay]
    arguments: Arguments = {
        "q": randn(B, H_kv * group, Tq, K),
        "k": randn(B, H_kv, Tk, K),
        "v": randn(B, H_kv, Tk, V),
        "causal": causal,
        "log_decay": None if shape is None else -strength * randn(*shape).abs(),
        "normalizer": normalizer,
        "decay_index": draw(st.sampled_from(["key", "query", None])),
        "feature_map": EluPlusOne() if normalizer == "sum" else None,
    }
    if normalizer is not None and draw(st.booleans()):
        arguments["norm_features"] = (randn(B, H_kv * group, Tq, K).abs(), randn(B, H_kv, Tk, K).abs())
    return arguments


def leaves(arguments: Arguments) -> Arguments:
    """The same call on tensors that take gradients."""

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(leaf(part) for part in value)
        return value.clone().requires_grad_() if isinstance(value, Tensor) else value

    return {name: leaf(value) for name, value in arguments.items()}


def tensors(arguments: Arguments) -> dict[str, Tensor]:
    found = {}
    for name, value in arguments.items():
        parts = value if isinstance(value, tuple) else (value,)
        found |= {f"{name} {n}": part for n, part in enumerate(parts) if isinstance(part, Tensor)}
    return found


def tokens(arguments: Arguments, index: slice | Tensor, row: int | None = None) -> Arguments:
    """Those tokens alone, of every row or of one."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        if not isinstance(value, Tensor) or value.ndim == 1:
            return value
        return (value if row is None else value[row : row + 1])[:, :, index]

    return {name: cut(value) for name, value in arguments.items()}


def gradients(loss: Tensor, arguments: Arguments) -> dict[str, Tensor]:
    """Gradients of all tensors of a call; where there is no path to a tensor, zero."""
    wanted = tensors(arguments)
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(wanted.items(), found, strict=True)}
