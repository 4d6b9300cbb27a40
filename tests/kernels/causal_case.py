"""One call of the causal kernels, and how its values and gradients are held against the reference in fp64."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.budget import moved
from kernels.device import DEVICE
from linattn import linear_attention, linear_attention_with_state
from linattn.kernels.causal import config as causal_config
from linattn.kernels.causal.attend import attend_both_ways, attend_causal
from linattn.ops.linear.call import log_decay_for, log_input_for
from linattn.ops.shared.types import LinearState

Found = dict[str, Tensor]


@dataclass
class Case:
    B: int = 1
    H: int = 2
    H_kv: int = 1
    T: int = 100
    K: int = 16
    V: int = 16
    decay: str | None = None
    index: str = "query"
    norm: str | None = "sum"
    dtype: torch.dtype = torch.float32
    state: bool = False
    mask: bool = False
    cu: tuple[int, ...] | None = None
    both: bool = False
    scale: float = 1.0
    weighed: bool = False
    tf32: bool = False

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.T + 7 * self.K)
        if self.cu is not None:
            self.B, self.T = 1, self.cu[-1]
        B, H, H_kv, T, K, V = self.B, self.H, self.H_kv, self.T, self.K, self.V
        n = B if self.cu is None else len(self.cu) - 1

        def draw(*shape: int, positive: bool = False) -> Tensor:
            x = torch.rand(shape, generator=gen) if positive else torch.randn(shape, generator=gen)
            return x.to(DEVICE)

        positive = self.norm is not None
        self.q = (draw(B, H, T, K, positive=positive) * self.scale).to(self.dtype)
        self.k = (draw(B, H_kv, T, K, positive=positive) * self.scale).to(self.dtype)
        if self.norm == "abs_max_one":
            # Row sums on both sides of 1 and of -1, none of them the rest of a cancellation.
            self.q = self.q * 0.1
            self.q[:, 0] *= -1
        # A decay per head gets the sum over all tokens: positive numbers keep it from cancelling. With a normaliser
        # they would do the opposite: it takes their mean away.
        self.v = (draw(B, H_kv, T, V, positive=self.decay == "head" and self.norm is None) * self.scale).to(self.dtype)
        self.d_out = draw(B, H, T, V, positive=self.decay == "head" and self.norm is None).to(self.dtype)
        self.initial = LinearState(draw(n, H_kv, K, V), draw(n, H_kv, K, positive=True)) if self.state else None
        self.d_state = draw(n, H_kv, K, V), draw(n, H_kv, K)
        self.a = {
            None: None,
            "head": -0.2 * draw(H_kv, positive=True),
            "token": F.logsigmoid(draw(B, H_kv, T) + 4),
            "strong": -20 * draw(B, H_kv, T, positive=True),
            # 64 tokens lose about exp(-55): the most that is still taken in two factors.
            "steep": torch.full((B, H_kv, T), -0.86, device=DEVICE),
            "closed": torch.where(draw(B, H_kv, T) > 1, -torch.inf, -0.1),
        }[self.decay]
        self.key_mask = draw(B, T, positive=True) > 0.3 if self.mask else None
        if self.key_mask is not None:
            self.k, self.v = (x.masked_fill(~self.key_mask[:, None, :, None], torch.nan) for x in (self.k, self.v))
        self.i = F.logsigmoid(2 * draw(B, H_kv, T)) if self.weighed else None
        if self.i is not None and self.key_mask is not None:
            self.i = self.i.masked_fill(~self.key_mask[:, None], torch.nan)
        self.cu_seqlens = None if self.cu is None else torch.tensor(self.cu, device=DEVICE)

    def moved(self, seed: int) -> "Case":
        """The same with each number moved by a few roundings."""
        other = copy(self)
        other.q, other.k, other.v = (moved(x, seed) for x in (self.q, self.k, self.v))
        other.a = None if self.a is None else moved(self.a, seed)
        other.i = None if self.i is None else moved(self.i, seed)
        other.initial = None if self.initial is None else LinearState(*(moved(x, seed) for x in self.initial))
        return other

    def cut(self) -> "Case":
        """The same with inputs of the 10 bits that tf32 reads."""
        other = copy(self)
        other.q, other.k, other.v = (cut(x) for x in (self.q, self.k, self.v))
        return other

    def reference(self, dtype: torch.dtype) -> Found:
        def call(q, k, v, a, i, initial):
            options = {
                "causal": not self.both, "log_decay": a, "log_input": i, "normalizer": self.norm, "impl": "reference",
                "key_mask": self.key_mask, "cu_seqlens": self.cu_seqlens, "decay_index": self.index,
            }  # fmt: skip
            if self.state:
                return linear_attention_with_state(q, k, v, initial_state=initial, **options)
            return linear_attention(q, k, v, **options), None

        return self._run(call, dtype)

    def kernels(self) -> Found:
        def call(q, k, v, a, i, initial):
            options = {
                "log_decay": log_decay_for(a, self.key_mask), "log_input": log_input_for(i, self.key_mask),
                "decay_index": self.index, "normalizer": self.norm, "eps": 1e-6, "key_mask": self.key_mask,
                "cu_seqlens": self.cu_seqlens, "out_dtype": v.dtype,
            }  # fmt: skip
            if self.both:
                return attend_both_ways(q, k, v, **options), None
            return attend_causal(q, k, v, initial=initial, need_state=self.state, tf32=self.tf32, **options)

        return self._run(call, self.dtype)

    def _run(self, call, dtype: torch.dtype) -> Found:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = {name: getattr(self, name).detach().to(dtype).requires_grad_() for name in "qkv"}
        if self.a is not None:
            leaves["a"] = self.a.to(wide).requires_grad_()
        if self.i is not None:
            leaves["i"] = self.i.to(wide).requires_grad_()
        initial = None
        if self.initial is not None:
            leaves["kv"], leaves["z"] = (x.to(wide).requires_grad_() for x in self.initial)
            initial = LinearState(leaves["kv"], leaves["z"])
        output, state = call(*(leaves[name] for name in "qkv"), leaves.get("a"), leaves.get("i"), initial)
        found = {"output": output}
        loss = (output.double() * self.d_out.double()).sum()
        if state is not None:
            found["state.kv"], found["state.k"] = state
            loss = loss + sum((x.double() * d.double()).sum() for x, d in zip(state, self.d_state, strict=True))
        grads = torch.autograd.grad(loss, list(leaves.values()))
        found.update({f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})
        if self.key_mask is not None:
            for name in ("output", "dq"):  # what a masked token gives carries no meaning
                found[name] = found[name].masked_fill(~self.key_mask[:, None, :, None], 0)
        return {name: x.detach() for name, x in found.items()}


def cut(x: Tensor) -> Tensor:
    """fp32 as a tensor core reads it: the last 13 bits are dropped."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def errors(case: Case) -> tuple[Found, dict[str, tuple[float, float]]]:
    """What the kernels found, and of each result the error and what is allowed."""
    exact, plain, found = case.reference(torch.float64), [case.reference(case.dtype)], case.kernels()
    if case.dtype == torch.float32:
        plain += [case.moved(seed).reference(torch.float64) for seed in (3, 4)]
    if case.tf32 and DEVICE == "cuda":  # the interpreter multiplies in fp32
        plain.append(case.cut().reference(torch.float64))
    return found, errors_of(case, exact, plain, found)


def errors_of(case: Case, exact: Found, plain: list[Found], found: Found) -> dict[str, tuple[float, float]]:
    eps = 2**-10 if case.tf32 and DEVICE == "cuda" else torch.finfo(case.dtype).eps
    if DEVICE == "cpu" and case.dtype == torch.bfloat16:
        eps *= 2  # Triton's interpreter cuts digits off where a GPU rounds
    sizes = {}
    for name, want in exact.items():
        assert found[name].shape == want.shape
        assert found[name].dtype == plain[0][name].dtype
        if want.numel() == 0:
            continue
        error, *costs = ((x[name].double() - want).abs().max().item() for x in (found, *plain))
        cost = max(costs)
        # A gradient through the normaliser is a rest of larger numbers too: do . v less its mean.
        factor = 4 if name in ("dq", "dk") and case.norm is not None else 2
        budget = factor * (cost + eps * (want.abs().max().item() + (_cancelled(case, exact) if name == "da" else 0)))
        sizes[name] = error, budget
    return sizes


def check(case: Case) -> Found:
    found, sizes = errors(case)
    for name, (error, budget) in sizes.items():
        assert error <= budget, f"{name}: error {error:.3g}, allowed {budget:.3g}"
    return found


def _cancelled(case: Case, exact: Found) -> float:
    """The decay's gradient is a rest of q . dq and k . dk, and rounding goes by what was there before."""
    assert case.a is not None
    k = case.k.nan_to_num().double()
    parts = ((case.q.double() * exact["dq"]).sum(-1), (k * exact["dk"]).sum(-1))
    largest = sum(x.abs().max().item() for x in parts)
    return largest * (case.B * case.T if case.a.ndim == 1 else 1)


@contextmanager
def segments(count: int) -> Iterator[None]:
    causal_config.TRIAL_SEGMENTS.append(count)
    try:
        yield
    finally:
        causal_config.TRIAL_SEGMENTS.clear()
