"""Inputs for maps inside the bidirectional kernels, and the same maps written down once more, in plain PyTorch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.budget import moved
from kernels.device import DEVICE
from linattn import linear_attention_with_state
from linattn.kernels.bidirectional.attend import attend_all
from linattn.ops.maps import Twin
from linattn.ops.shared.types import LinearState

TWO_PARTS = ("split_power", "norm_power", "split_expm1", "squares_and_linear", "softmax_pair")
LEAVES = ("q", "k", "v", "table_q", "table_k", "token_q", "token_k", "constant_q", "constant_k", "start_kv", "start_k")


class Case(NamedTuple):
    name: str
    flows: int
    q: Tensor
    k: Tensor
    v: Tensor
    table_q: Tensor
    table_k: Tensor
    token_q: Tensor | None
    token_k: Tensor | None
    constant_q: Tensor | None
    constant_k: Tensor | None
    start_kv: Tensor | None
    start_k: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None

    def twins(self) -> tuple[Twin, Twin]:
        names = (self.name, "sign_power" if self.name == "norm_power" else self.name)
        parts = 2 if self.name in TWO_PARTS else 1
        tables = (None, None) if self.name in ("identity", "relu", "elu", "softmax_pair", "unit_silu") else self[5:7]
        if self.name == "split_power" and self.flows == 2:
            # Its flows share their numbers.
            tables = tuple(_both_flows(table, every) for table, every in zip(self[5:7], (2, 3), strict=True))
            tables = tuple(torch.cat([table, table], -1) for table in tables)
        elif self.name in ("split_power", "split_expm1"):
            # Its parts share their numbers.
            tables = tuple(torch.cat([table, table], -1) for table in self[5:7])
        tokens, constants = self[7:9], self[9:11]
        both = zip(names, tables, tokens, constants, strict=True)
        query, key = (Twin(n, parts, self.flows, table, token, c) for n, table, token, c in both)
        return query, key


def draw(
    name: str, dtype: torch.dtype = torch.float32, B: int = 2, H: int = 2, H_kv: int = 2, Tq: int = 70, Tk: int = 70,
    D: int = 16, V: int = 16, flows: int = 1, heads: str = "own", batch: bool = False, tokens: bool = False,
    constant: bool = False, state: bool = False, mask: bool = False, cu: tuple[int, ...] = (), seed: int = 0,
) -> Case:  # fmt: skip
    """``heads`` of the tables: each head its own, the queries those of their keys, or one for all."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    if cu:
        Tq = Tk = cu[-1]
    n = len(cu) - 1 if cu else B
    parts = 2 if name in TWO_PARTS else 1
    q, k, v = normal(B, H, Tq, D), normal(B, H_kv, Tk, D), normal(B, H_kv, Tk, V) + 0.5
    if name == "identity":
        q, k = q.abs(), k.abs()
    of_query = {"own": H * flows, "shared": H_kv * flows, "one": 1 if flows == 1 else flows}[heads]
    of_key = of_query if heads == "one" else H_kv * flows
    if name == "split_power":
        of_query, of_key = max(of_query // flows, 1), max(of_key // flows, 1)
    numbers = D if name in ("split_power", "split_expm1") else parts * D
    tables = [_table(name, normal(B if batch else 1, h, 2, numbers)) for h in (of_query, of_key)]
    factors = [normal(B, H, Tq).abs() + 0.5, normal(1 if cu else B, H_kv, Tk).abs() + 0.5]
    if name == "shifted_power":
        tokens = True
    constants = [torch.tensor(x, dtype=torch.float64) for x in (0.7, 1.3)]
    K = parts * D + constant
    start = normal(n, H_kv * flows, K, V // flows), normal(n, H_kv * flows, K).abs()
    key_mask = torch.rand(B, Tk, generator=g) < 0.6 if mask else None
    if key_mask is not None:
        key_mask[-1, :3] = False
        hidden = ~key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)

    def fp32(xs: list[Tensor] | tuple[Tensor, ...], there: bool) -> list[Tensor | None]:
        return [x.float().to(DEVICE) if there else None for x in xs]

    return Case(
        name, flows, *(x.to(dtype).to(DEVICE) for x in (q, k, v)), *fp32(tables, True), *fp32(factors, tokens),
        *fp32(constants, constant), *fp32(start, state), None if key_mask is None else key_mask.to(DEVICE),
        torch.tensor(cu, device=DEVICE) if cu else None,
    )  # fmt: skip


def _table(name: str, x: Tensor) -> Tensor:
    """Numbers that the map is meant for."""
    a, b = x.unbind(2)
    if name == "split_power":
        a, b = 1.2 + a.abs(), (0.5 + b.abs()) * torch.where(b > 0, 1.0, -1.0)
    elif name == "norm_power":
        a, b = torch.full_like(a, 1.5), torch.full_like(b, 0.5)
    elif name == "split_expm1":
        b = (0.2 + 0.3 * b.abs().clamp(max=2)) * torch.where(b > 0, 1.0, -1.0)
    elif name in ("squares", "squares_and_linear"):
        a, b = a.abs() + 0.1, 0.1 * b
    elif name == "shifted_power":
        a, b = a.abs() + 0.2, torch.full_like(b, 3.0)
    return torch.stack([a, b], 2)


def _both_flows(table: Tensor, every: int) -> Tensor:
    """Flow 1 has the numbers of flow 0, but for the sign of b in every second or third channel."""
    turned = torch.ones(2, table.shape[-1], dtype=table.dtype, device=table.device)
    turned[1, ::every] = -1
    return torch.stack([table, table * turned], 2).flatten(1, 2)


def features(x: Tensor, twin: Twin, flows: int, H: int) -> Tensor:
    """``(B, H, T, D) -> (B, H flows, T, F)``: the formulas of the maps, parameters broadcast to virtual heads."""
    x = x.repeat_interleave(flows, 1)
    a = b = None
    if twin.table is not None:
        table = twin.table
        if table.shape[1] not in (1, x.shape[1]):
            # Heads of a group share, flows alternate.
            table = table.unflatten(1, (-1, flows)).repeat_interleave(H // (table.shape[1] // flows), 1).flatten(1, 2)
        a, b = (row.unsqueeze(2) for row in table.to(x.dtype).unbind(2))
    token = None if twin.token is None else twin.token.to(x.dtype).repeat_interleave(flows, 1).unsqueeze(-1)
    both = torch.cat([x, -x], -1) if twin.parts == 2 else x
    found = _of_table(x, both, a, b, token, twin.name) if a is not None else _plain(x, both, twin.name)
    return found if token is None or twin.name == "shifted_power" else found * token


def _plain(x: Tensor, both: Tensor, name: str) -> Tensor:
    if name == "softmax_pair":
        return torch.cat([half.softmax(-1) for half in both.chunk(2, -1)], -1)
    if name == "unit_silu":
        return F.normalize(x * x.sigmoid() + 0.5, dim=-1)
    return {"identity": x, "relu": x.relu(), "elu": F.elu(x) + 1}[name]


def _of_table(x: Tensor, both: Tensor, a: Tensor, b: Tensor, token: Tensor | None, name: str) -> Tensor:
    if name == "pair_relu":
        return (a * x + b * x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)).relu()
    if name == "split_power":
        return _power(both * b, a)
    if name == "norm_power":
        n = (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()
        return _power(both / n, a[..., :1] * (b[..., :1] + n.tanh()))
    if name == "sign_power":
        return _power(both, a[..., :1])
    if name == "split_expm1":
        return (both * b).relu().clamp(max=32).expm1()
    if name == "squares":
        return a * x.square()
    if name == "squares_and_linear":
        D = x.shape[-1]
        return torch.cat([a[..., :D] * x.square(), b[..., D:] * x], -1)
    assert token is not None
    return a * ((x.relu() + 1e-6) * token) ** b[..., :1].detach()  # its power is not learnt


def _power(y: Tensor, p: Tensor) -> Tensor:
    """``max(y, 0)^p``, 0 with gradients of 0 where y is not positive."""
    return torch.where(y > 0, torch.where(y > 0, y, 1.0) ** p, 0.0)


def evaluate(case: Case, how: str, normalizer: str | None = "sum", need_state: bool = True) -> dict[str, Tensor]:
    """Output, state and the gradients of all leaves; ``how`` is kernel, plain (in the dtype given) or exact (fp64)."""
    kind = torch.float64 if how == "exact" else None
    leaves = {n: getattr(case, n) for n in LEAVES if getattr(case, n) is not None}
    leaves = {n: x.detach().to(kind or x.dtype).requires_grad_() for n, x in leaves.items()}
    case = case._replace(**leaves)
    twins = case.twins()
    start = None if case.start_kv is None else LinearState(case.start_kv, case.start_k)
    packing = {"key_mask": case.key_mask, "cu_seqlens": case.cu_seqlens}
    if how == "kernel":
        output, state = attend_all(
            case.q, case.k, case.v, maps=twins, normalizer=normalizer, eps=1e-6, initial=start,
            out_dtype=case.v.dtype, need_state=need_state, **packing,
        )  # fmt: skip
    else:
        output, state = _attend_in_torch(case, twins, how, normalizer, start, packing)
    outputs = {"output": output, "kv": state.kv, "z": state.k} if need_state else {"output": output}
    g = torch.Generator().manual_seed(1)
    seeds = [torch.randn(*x.shape, generator=g).to(DEVICE).to(case.v.dtype).to(x.dtype) for x in outputs.values()]
    unused = "table_q", "table_k"
    wanted = {n: x for n, x in leaves.items() if n not in unused or _learns(case.name)}
    grads = torch.autograd.grad(list(outputs.values()), list(wanted.values()), seeds, materialize_grads=True)
    found = {n: x.detach() for n, x in outputs.items()} | {f"d {n}": x for n, x in zip(wanted, grads, strict=True)}
    if case.key_mask is not None:
        # Gradients of what is masked are 0 in kernels, NaN where 0 met NaN in plain code.
        hidden = ~case.key_mask[:, None, :]
        for n in found.keys() & {"d k", "d v", "d token_k"}:
            if how == "kernel":
                assert found[n].isfinite().all()
            gone = hidden if n == "d token_k" else hidden.unsqueeze(-1)
            found[n] = found[n].masked_fill(gone, 0)
    return found


def _learns(name: str) -> bool:
    return name not in ("identity", "relu", "elu", "softmax_pair", "unit_silu", "norm_power")


def _attend_in_torch(
    case: Case, twins: tuple[Twin, Twin], how: str, normalizer: str | None, start: LinearState | None, packing: dict
) -> tuple[Tensor, LinearState]:  # fmt: skip
    (_, H, Tq, _), (_, H_kv, Tk, _), flows = case.q.shape, case.k.shape, case.flows
    k, v = case.k, case.v
    if case.key_mask is not None:
        hidden = ~case.key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 1.0), v.masked_fill(hidden, 0.0)
    wide = torch.float64 if how == "exact" else torch.float32
    phi, psi = (features(x.to(wide), twin, flows, n) for x, twin, n in zip((case.q, k), twins, (H, H_kv), strict=True))
    if twins[0].constant is not None:
        phi, psi = (
            torch.cat([x, twin.constant.to(wide).expand(*x.shape[:3], 1)], -1)
            for x, twin in zip((phi, psi), twins, strict=True)
        )
    phi, psi = phi.to(case.q.dtype), psi.to(case.q.dtype)
    # Virtual heads of one key head stand side by side, as grouped heads want: (g, f) of the queries beside (f) of keys.
    G = H // H_kv
    phi = phi.unflatten(1, (H_kv, G, flows)).transpose(2, 3).flatten(1, 3)
    v = v.unflatten(3, (flows, -1)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    output, state = linear_attention_with_state(
        phi, psi, v, initial_state=start, normalizer=normalizer, eps=1e-6, validate=False,
        # The specification needs the square of the length; in fp64 the chunked form is as good where that is too much.
        impl="reference" if how == "exact" and Tq * Tk <= 2**22 else "chunked", **packing,
    )  # fmt: skip
    output = output.unflatten(1, (H_kv, flows, G)).permute(0, 1, 3, 4, 2, 5).flatten(4, 5).flatten(1, 2)
    return output, state


def plain_ones(case: Case, **options: Any) -> list[dict[str, Tensor]]:
    """What plain PyTorch gives in the same dtype; in fp32 also what inputs moved by a few roundings give.

    There kernels and PyTorch err by the order of their sums alone, and neither bounds the other.
    """
    plain = [evaluate(case, "plain", **options)]
    if case.q.dtype == torch.float32:
        leaves = {n: getattr(case, n) for n in LEAVES if getattr(case, n) is not None}
        for seed in (3, 4):
            other = case._replace(**{n: moved(x, seed) for n, x in leaves.items()})
            plain.append(evaluate(other, "exact", **options))
    return plain


def budgets(
    found: dict[str, Tensor], plain: list[dict[str, Tensor]], exact: dict[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, float, float]]:
    """Name, error and what the worst of ``plain`` allows; a NaN is an infinite error."""
    eps = torch.finfo(dtype).eps
    for name, e in exact.items():
        assert found[name].shape == e.shape, name
        assert found[name].dtype == plain[0][name].dtype, name
        if e.numel() == 0:
            continue
        error, *costs = ((x[name] - e).abs().max().item() for x in (found, *plain))
        # One number, a sum over all tokens: with luck plain PyTorch has its digits, and no other number tells of it.
        roundings = exact["output"].shape[:3].numel() ** 0.5 if name.startswith("d constant") else 1.0
        allowed = 2 * (max(costs) + roundings * eps * e.abs().max().item())
        yield name, error if error == error else torch.inf, allowed
