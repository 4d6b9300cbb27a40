"""Parameters of feature maps for the bidirectional kernels: where they lie, and their gradients, summed from parts."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kernels.bidirectional.config import Inputs, Maps, Side, Widths
from linattn.kernels.common.support import MAP_CODES
from linattn.ops.maps import Twin


class Arguments(NamedTuple):
    """Arguments of kernels for one side: pointers (any if there is none), strides, the code (-1: none), a factor?"""

    pointers: tuple[Tensor, Tensor, Tensor]
    table_strides: tuple[int, int, int, int]  # of a sequence, a key head, a query head of its group, a flow
    token_strides: tuple[int, int, int, int]  # of a sequence, a key head, a query head of its group, a token
    code: int
    has_token: bool


class Grads(NamedTuple):
    """Parts of the gradients of one side's table, factors and constant; empty where there is none."""

    table: Tensor
    token: Tensor
    constant: Tensor


def maps_of(twins: tuple[Twin, Twin]) -> Maps:
    """The maps of queries and keys; they must agree in their number of features and flows."""
    shapes = [(twin.parts, twin.flows, twin.constant is not None) for twin in twins]
    if shapes[0] != shapes[1]:
        raise ValueError(f"maps of q and k must agree in parts, flows and a constant, got {shapes[0]} and {shapes[1]}")
    query, key = (Side(MAP_CODES[twin.name], twin.table, twin.token, twin.constant) for twin in twins)
    return Maps(query, key, twins[1].parts, twins[1].flows)


def arguments(side: Side | None, H: int, H_kv: int, flows: int, filler: Tensor) -> Arguments:
    """The arguments for the side of the queries, with H heads, or of the keys, with H = H_kv."""
    if side is None:
        return Arguments((filler, filler, filler), (0, 0, 0, 0), (0, 0, 0, 0), -1, False)
    table, token, constant = side.table, side.token, side.constant
    if table is not None and table.stride()[2:] != (table.shape[3], 1):
        table = table.contiguous()
    found = (filler if x is None else x for x in (table, token, constant))
    strides = (0, 0, 0, 0) if table is None else _table_strides(table, H, H_kv, flows)
    token_strides = (0, 0, 0, 0)
    if token is not None:
        batch, head = (0 if token.shape[d] == 1 else token.stride(d) for d in (0, 1))
        by_query = token.shape[1] == H != H_kv
        token_strides = (batch, head * (H // H_kv) if by_query else head, head if by_query else 0, token.stride(2))
    plain = side.code == MAP_CODES["identity"] and token is None
    return Arguments((*found,), strides, token_strides, -1 if plain else side.code, token is not None)  # type: ignore[arg-type]


def _table_strides(table: Tensor, H: int, H_kv: int, flows: int) -> tuple[int, int, int, int]:
    batch, head, heads = 0 if table.shape[0] == 1 else table.stride(0), table.stride(1), table.shape[1]
    if heads == 1:
        return batch, 0, 0, 0
    if heads == H_kv * flows:
        return batch, head * flows, 0, head
    if heads == H * flows:
        return batch, head * flows * (H // H_kv), head * flows, head
    if heads == flows:
        return batch, 0, 0, head
    raise ValueError(f"a table of {heads} heads fits neither {H} nor {H_kv} heads of {flows} flows")


def new_grads(side: Side | None, segments: int, N: int, x: Tensor, H_kv: int, w: Widths, learn: bool) -> Grads:
    """Memory for the parts of gradients that the kernels write; x is q or k."""
    B, H, T, _ = x.shape
    table, token, constant = (None, None, None) if side is None else side[1:]
    # Three tensors even if all are empty: an operator must not return the same tensor twice.
    shapes = (
        (segments, N, H_kv, w.flows, H // H_kv, 2, w.F) if learn and table is not None else (0,),
        (0,) if token is None else (w.flows, B, H, T),
        (0,) if constant is None else (segments, N, H_kv, w.flows),
    )
    # Zeros: a segment without tokens writes no part of a table.
    makers = x.new_zeros if learn else x.new_empty, x.new_empty, x.new_empty
    return Grads(*(make(shape, dtype=torch.float32) for make, shape in zip(makers, shapes, strict=True)))


def summed(parts: Grads, side: Side | None) -> Grads:
    """The gradients as sums of parts, each in the shape of its parameter; sums run in a fixed order."""
    table, token, constant = parts
    if side is None:
        return parts
    if side.table is not None and table.numel():
        table = _summed_table(table, side.table.shape)
    if side.token is not None:
        token = _summed_token(token, side.token.shape)
    return Grads(table, token, constant.sum() if side.constant is not None else constant)


def _summed_table(parts: Tensor, shape: torch.Size) -> Tensor:
    """The table's gradient from parts ``(segments, N, H_kv, flows, G, 2, F)``, in one sum over all that share a row."""
    _, _, H_kv, flows, G, *_ = parts.shape
    batch, heads = shape[:2]
    dims = [0, 1] if batch == 1 else [0]
    if heads == H_kv * flows:
        dims += [4]
    elif heads != H_kv * flows * G:
        dims += [2, 3, 4] if heads == 1 else [2, 4]
    dims = [d for d in dims if parts.shape[d] > 1]  # a sum of one number would still be a kernel
    grad = parts.sum(dims, keepdim=True) if dims else parts
    return grad.transpose(3, 4).reshape(shape)


def _summed_token(parts: Tensor, shape: torch.Size) -> Tensor:
    grad = parts.sum(0) if parts.shape[0] > 1 else parts[0]  # (B, H, T)
    if shape[0] == 1:
        grad = grad.sum(0, keepdim=True)
    if shape[1] != grad.shape[1]:
        grad = grad.unflatten(1, (shape[1], -1)).sum(2)
    return grad


def arguments_of(x: Inputs) -> tuple[Arguments, Arguments]:
    """The arguments for both sides, queries and keys."""
    (H, H_kv), flows = (x.q.shape[1], x.k.shape[1]), x.widths.flows
    query, key = (None, None) if x.maps is None else (x.maps.query, x.maps.key)
    return arguments(query, H, H_kv, flows, x.q), arguments(key, H_kv, H_kv, flows, x.q)


def strides_of_keys(side: Arguments) -> tuple[int, ...]:
    """Strides of a side that has no groups."""
    (table_b, table_h, _, table_f), (token_b, token_h, _, token_t) = side.table_strides, side.token_strides
    return table_b, table_h, table_f, token_b, token_h, token_t
