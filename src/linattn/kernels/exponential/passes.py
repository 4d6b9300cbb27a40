"""The passes of exponential attention: launches of the kernels with their tensors. ``library`` makes them operators."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.causal.row_sums import Walk, row_factors, row_sums
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import side_by_side
from linattn.kernels.common.support import interpreted, known_stride, padded
from linattn.kernels.exponential.config import D_K, D_Q, D_V, OUTPUT, Tiles, pick, segments
from linattn.ops.shared.types import STRONGEST_DECAY

State = tuple[Tensor, Tensor]  # kv (.., K, V) and z (.., K), fp32 and contiguous

# Tokens of a block of gates, a power of two.
BLOCK = 512
# Bound of the sum of decays from a token to the end of its chunk: e^-60 leaves e^-27 for smaller weights in fp32, bf16.
STEEPEST = -60.0
# The same bound for chunks that share the unit of the last of them.
GENTLE = -40.0
# Bounds of the exponent of the denominator's floor: 1 / floor leaves fp32 room for sums of 1e8.
FLOOR = -70.0, 80.0


class Units(NamedTuple):
    """The results of the kernel of units, see there."""

    gates: Tensor
    keep: Tensor
    spans: Tensor
    last: Tensor


class Marks(NamedTuple):
    """States at the end of every stretch of tokens, and the products of these states with their gradients."""

    states: Tensor  # (rows places, V, K)
    z: Tensor  # (rows places, K)
    flows: Tensor  # (tiles, query rows, places)


@dataclass(frozen=True)
class Passes:
    """One call, with N sequences, H query heads and HS key heads."""

    q: Tensor  # (B, H, T, K)
    k: Tensor  # (B, HS, T, K)
    v: Tensor  # (B, HS, T, V)
    log_input: Tensor  # (B, HS, T)
    log_decay: Tensor  # (B, HS, T)
    cu: Tensor | None  # (N+1,)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """N, H, HS, T, K, V."""
        N = self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1
        return N, self.q.shape[1], self.k.shape[1], self.q.shape[2], self.q.shape[3], self.v.shape[3]

    @cached_property
    def length(self) -> int:
        """Tokens of a tile."""
        return self._tiles(OUTPUT).L

    @cached_property
    def stretch(self) -> int:
        """Tokens between two marks, so that all in fp32 take an eighth of the memory of 16-bit q, k, v and output."""
        K, V = self.sizes[4:]
        return max(2 * self.length, 4 * padded(max(K, V)))

    @cached_property
    def cut(self) -> tuple[int, int]:
        """Tokens of a segment, and the number of segments. Segments are whole stretches."""
        N, H, _, T, _, V = self.sizes
        return segments(T, N * H * -(-V // self._tiles(OUTPUT).BW), self.stretch, self.q.device)

    def units(self, start: Tensor | None, scale: float) -> Units:
        from linattn.kernels.exponential.device.units import block_maps, units

        N, _, HS, T, _, _ = self.sizes
        block = max(self.length, min(BLOCK, 1 << (T - 1).bit_length()))
        blocks = -(-T // block)
        i, f = self.log_input, self.log_decay
        inputs = (i, *i.stride(), f, *f.stride(), self.cu)
        sums, bests = (self._new(N, HS, blocks, dtype=torch.float64) for _ in range(2))
        gates, keep = self._new(i.shape[0], HS, T, 2), self._new(i.shape[0], HS, T)
        spans = self._new(i.shape[0] * HS, self.places(self.length), dtype=torch.int32)
        last = self._new(N, HS, dtype=torch.float64)
        packed = {"PACKED": self.cu is not None, "BLOCK": block, "num_warps": 4}
        launch(block_maps, N * HS * blocks, *inputs, sums, bests, T, HS, blocks, **packed)
        launch(
            units, N * HS * blocks, *inputs, None if start is None else start.contiguous(), sums, bests,
            gates, keep, spans, last, T, HS, blocks, spans.shape[1], scale,
            L=self.length, START=start is not None, STRONGEST=STRONGEST_DECAY, STEEPEST=STEEPEST, GENTLE=GENTLE,
            LEAST=FLOOR[0], MOST=FLOOR[1], **packed,
        )  # fmt: skip
        return Units(gates, keep, spans, last)

    def borders(
        self, y: Tensor, w: Tensor, pairs: Tensor, units: Units, start: State | None, end: State | None,
        *, reverse: bool,
    ) -> State | None:  # fmt: skip
        """States at the start of every segment, or against time their gradients at its end.

        With several segments the state after the last one is written to ``end``.
        """
        segment, NSEG = self.cut
        if NSEG == 1:
            return start
        from linattn.kernels.causal.device.scan import scan
        from linattn.kernels.exponential.device.states import states

        N, H, HS, T, K, V = self.sizes
        heads, tiles = H if reverse else HS, self._tiles(OUTPUT)
        columns = -(-V // tiles.BW)
        kv, z, kepts = (self._new(N, heads, NSEG, *size) for size in ((K, V), (K,), ()))
        launch(
            states, N * heads * NSEG * columns, y, *y.stride(), w, *w.stride(), pairs, units.keep, units.spans,
            self.cu, kv, z, kepts, T, segment, NSEG, heads, units.spans.shape[1],
            K=K, V=V, BK=padded(K), BW=tiles.BW, L=self.length, TILES=columns, GROUP=heads // HS, REVERSE=reverse,
            PACKED=self.cu is not None, num_warps=tiles.warps, num_stages=1,
            **self._dot_type | {"PREC": "tf32x3" if self.q.dtype == torch.float16 else self._dot_type["PREC"]},
        )  # fmt: skip
        for part, first, last in zip((kv, z), start or (None, None), end or (None, None), strict=True):
            size = part[0, 0, 0].numel()
            block = min(1024, padded(size))
            launch(
                scan, N * heads * -(-size // block), part, kepts, first, last, NSEG,
                SIZE=size, BLOCK=block, BLOCKS=-(-size // block), REVERSE=reverse, DECAY=True,
                S0=first is not None, S1=last is not None, num_warps=4,
            )  # fmt: skip
        return kv, z

    def walk(
        self, role: int, d_out: Tensor | None, out: Tensor, units: Units, den: Tensor, *, rows: Tensor | None = None,
        start: State | None = None, end: State | None = None, marks: Marks | None = None,
        dots: Tensor | None = None, made: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One walk, see the kernel. dots: takes q . dq, from steep walks only, or k . dk.

        made: the result of row_factors, for walks that are not steep.
        """
        from linattn.kernels.exponential.device.walk import walk

        q, k, v = self.q, self.k, self.v
        g = q if d_out is None else d_out
        x, y, w = ((q, k, v), (g, v, k), (v, g, q), (k, q, g))[role]
        N, H, HS, T, _, V = self.sizes
        X, W = x.shape[3], w.shape[3]
        tiles = self._tiles(role)
        columns = -(-W // tiles.BW)
        kept = marks if role in (D_Q, D_K) else None
        u = q if role == D_Q else k
        natural = role in (OUTPUT, D_V)  # the state is not transposed: its rows are features of keys
        segment, NSEG = self.cut
        kv, z = start or (None, None)
        # With several segments the scan over their states has written the last state.
        kv_end, z_end = end if end is not None and NSEG == 1 else (None, None)
        for steep in (False, True):
            if made is not None:
                rows = None if steep else made
            launch(
                walk, N * H * NSEG * columns, x, *x.stride(), y, *y.stride(), w, *w.stride(), u, *u.stride(),
                out, den, *units[:3], den if rows is None else rows,
                den if dots is None else dots, 0 if dots is None else dots.stride(0),
                *(kept or (None, None, None)), 0 if kept is None else kept.flows.stride(0), self.cu,
                kv, *((V, 1) if natural else (1, V)), kv_end, z, z_end,
                T, segment, NSEG, H, HS, units.spans.shape[1], self.places(self.stretch),
                X=X, W=W, BX=padded(X), BW=tiles.BW, L=self.length, TILES=columns, GROUP=H // HS, ROLE=role,
                STEEP=steep, PACKED=self.cu is not None, S0=start is not None, S1=kv_end is not None,
                MARK=kept is not None, CK=self.stretch // self.length, DOTS=dots is not None and (steep or role == D_K),
                EVEN=self.cu is None and T % self.length == 0,
                X_T=known_stride(x), Y_T=known_stride(y), W_T=known_stride(w), U_T=known_stride(u),
                LEAN=tiles.lean, PARTS=tiles.parts, MADE=made is not None and not steep,
                SIDE_BY_SIDE=side_by_side(out),
                STAGES=1 if steep else tiles.stages,
                num_warps=tiles.warps, num_stages=1 if steep else tiles.stages,
                **self._dot_type,
            )  # fmt: skip

    def row_factors(self, units: Units, den: Tensor, start: State | None, end: State | None) -> Tensor | None:
        """1 / n (B, H, T) of walks that are not steep; writes their row sums to den, and the last sum of keys.

        None if walks make their row sums themselves.
        """
        if not self._tiles(OUTPUT).apart:
            return None
        last = end[1] if end is not None and self.cut[1] == 1 else None
        walk = Walk(
            (self.length, *self.cut), units.spans.shape[1], 2, *units[:3], None if start is None else start[1], last
        )
        parts = row_sums(launch, self.q, self.k, walk, key_mask=None, cu=self.cu)
        return row_factors(launch, den, [walk], [parts], self.sizes[2], norm=0, eps=0.0)

    def dots(self, role: int) -> Tensor:
        """Room for one number per token and tile of columns of keys."""
        return self._new(-(-self.sizes[4] // self._tiles(role).BW), *self.q.shape[:3])

    def marks(self) -> Marks:
        _, H, HS, _, K, V = self.sizes
        lines, places = self.q.shape[0], self.places(self.stretch)
        columns = -(-K // self._tiles(D_K).BW)
        states, z = self._new(lines * HS * places, V, K), self._new(lines * HS * places, K)
        return Marks(states, z, self._new(columns, lines * H, places))

    def rows(self, out: Tensor, d_out: Tensor, den: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """r and e, and q . dq."""
        from linattn.kernels.exponential.device.rows import rows

        _, H, HS, T, _, V = self.sizes
        found, a = self._new(*den.shape, 2), self.dots(D_Q)
        block = max(1, 4096 // padded(V))
        launch(
            rows, -(-den.numel() // block), out, *out.stride(), d_out, *d_out.stride(), den, gates, found, a,
            T, H, den.numel(), TILES=a.shape[0], V=V, BV=padded(V), C=block, GROUP=H // HS, num_warps=4,
        )  # fmt: skip
        return found, a

    def gate_gradients(self, a: Tensor, b: Tensor, flows: Tensor) -> tuple[Tensor, Tensor]:
        from linattn.kernels.exponential.device.rows import gates

        N, H, HS, T, _, _ = self.sizes
        d_i, d_f = (self._new(*self.log_input.shape) for _ in range(2))
        stretches, f = -(-T // self.stretch), self.log_decay
        launch(
            gates, N * HS * stretches, a, a.stride(0), b, b.stride(0), flows, flows.stride(0), f, *f.stride(), self.cu,
            d_i, d_f, T, H, HS, stretches, flows.shape[2],
            A_TILES=a.shape[0], TILES=b.shape[0], GROUP=H // HS, STRETCH=self.stretch, PACKED=self.cu is not None,
            STRONGEST=STRONGEST_DECAY, num_warps=4,
        )  # fmt: skip
        return d_i, d_f

    @cached_property
    def _dot_type(self) -> dict[str, Any]:
        """How kernels multiply: bf16 as it is, fp16 in tf32, as states and scores may leave its range, fp32 exactly."""
        # The interpreter multiplies the bits of bf16 as integers.
        bf16 = self.q.dtype == torch.bfloat16 and not interpreted()
        return {"BF16": bf16, "PREC": "ieee" if self.q.dtype == torch.float32 else "tf32"}

    def _tiles(self, role: int) -> Tiles:
        K, V = self.q.shape[3], self.v.shape[3]
        X, W = (V, K) if role in (D_Q, D_K) else (K, V)
        return pick(role, X, W, self.q.dtype, self.q.device)

    def places(self, length: int) -> int:
        """Number of pieces of a row: one more for each packed sequence, whose last piece may be short."""
        N, T = self.sizes[0], self.sizes[3]
        return -(-T // length) if self.cu is None else T // length + N + 1

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)
