"""The passes of causal attention: launches of the kernels with their tensors. ``library`` makes them operators."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linattn.kernels.causal import config as causal_config
from linattn.kernels.causal.config import Config, pick, segments
from linattn.kernels.causal.row_sums import Walk, row_factors, row_sums
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import side_by_side
from linattn.kernels.common.support import interpreted, padded

# Most features of x in one sweep of a gradient in bf16 and tf32: a larger state suits no product well, or spills.
SPLIT_AT = 128
State = tuple[Tensor, Tensor]  # kv (.., K, V) and z (.., K), fp32 and contiguous

Gates = tuple[Tensor, int, Tensor]
Rows = tuple[Tensor, Tensor]  # the normaliser: 1 / n, and the gradient of its row sum times n, (B, H, T) fp32


@dataclass(frozen=True)
class Border:
    """States at the start of every segment, (N, HS, NSEG, K, V) and (N, HS, NSEG, K); of one segment, as given."""

    state: State | None
    last: State | None = None  # the state after the last segment, if a scan made it


@dataclass(frozen=True)
class Marks:
    """States, or their gradients, at the end of every stretch of tokens."""

    stretch: int
    places: int
    kv: Tensor  # (rows HS places, V, K)
    z: Tensor | None  # (.., K)


@dataclass(frozen=True)
class Passes:
    """One call, with N sequences, H query heads and HS key heads, each of which G query heads share."""

    q: Tensor  # (B, H, T, K)
    k: Tensor  # (B, HS, T, K)
    v: Tensor  # (B, HS, T, V)
    log_decay: Tensor | None  # (HS,) or (B, HS, T)
    key_mask: Tensor | None  # (B, T)
    cu: Tensor | None  # (N+1,)
    key_index: bool
    norm: int  # 0 none, 1 sum, 2 abs_max_one
    eps: float
    learned: bool = False  # whether the decay gets a gradient
    log_input: Tensor | None = None  # (B, HS, T), logarithms of the keys' weights; beside a decay
    tf32: bool = False  # whether fp32 multiplies in tf32

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """N, H, HS, T, K, V."""
        N = self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1
        return N, self.q.shape[1], self.k.shape[1], self.q.shape[2], self.q.shape[3], self.v.shape[3]

    @cached_property
    def cut(self) -> tuple[int, int, int]:
        """Tokens of a chunk, tokens of a segment, segments."""
        N, H, _, T, K, V = self.sizes
        config = self._config("output", K, V)
        programs = N * H * -(-V // config.BW)
        # Whole stretches: see marks.
        unit = self._stretch(config.L) if self.log_decay is not None else config.L
        return config.L, *segments(T, programs, config, unit, self.q.device)

    @cached_property
    def _chunks(self) -> int:
        """Number of places for the totals of chunks in a row, see the kernel of potentials."""
        N, T, L = self.sizes[0], self.sizes[3], self.cut[0]
        return -(-T // L) if self.cu is None else T // L + N + 1

    def _dot_type(self, role: str) -> dict[str, Any]:
        """How kernels multiply: bf16 as it is, fp16 in tf32, as states and scores may leave its range, fp32 exactly."""
        exact = self.q.dtype == torch.float32 and not self.tf32
        precision = causal_config.FP32_PRODUCTS if exact else "tf32"
        if self.learned and self._split and not exact and role in ("dq", "dk", "states"):
            precision = "tf32x3"  # products of values and rests of state and weights, as the kernels do it in bf16
        return {"BF16": self._bf16, "PREC": precision}

    @cached_property
    def _bf16(self) -> bool:
        """Whether products are in bf16: not in the interpreter, which multiplies the bits of bf16 as integers."""
        return self.q.dtype == torch.bfloat16 and not interpreted()

    @property
    def _split(self) -> bool:
        """Whether differences of log decays need more digits than fp32 has: bf16 would not notice."""
        return self.q.dtype != torch.bfloat16

    @property
    def _weight(self) -> int:
        """The plane of the gates that holds the weights of keys; 0 if they have none."""
        return 0 if self.log_input is None else 3 + self._split

    def potentials(self, against: bool) -> Gates | None:
        """The effect of the decay inside chunks: gates, the length of chunks, what each chunk keeps of a state."""
        if self.log_decay is None:
            return None
        from linattn.kernels.causal.device.potentials import potentials

        N, _, HS, T, _, _ = self.sizes
        B, L = self.q.shape[0], self.cut[0]
        a = self.log_decay
        if a.ndim == 1:
            a = a[None, :, None].expand(B, HS, T)
        planes = 3 + self._split + (self._weight > 0)
        gates, keeps = self._with_room(planes, B, HS, T), self._new(B * HS, self._chunks)
        if self.log_input is not None:
            torch.exp(self.log_input, out=gates[self._weight])
        per_program = 8
        blocks = -(-T // (L * per_program))
        launch(
            potentials, N * HS * blocks, a, *a.stride(), gates, gates.stride(0), keeps,
            self.cu, T, HS, blocks, self._chunks,
            L=L, CHUNKS=per_program, EXCLUSIVE=self.key_index != against, PACKED=self.cu is not None,
            SPLIT=self._split, num_warps=4,
        )  # fmt: skip
        return gates, gates.stride(0), keeps

    def borders(
        self, y: Tensor, w: Tensor, initial: State | None, decay: Gates | None, *, reverse: bool,
        with_z: bool, with_last: bool, rows: Rows | None = None,
    ) -> Border:  # fmt: skip
        """States before the segments, from y = k and w = v; from y = q and w = do, their gradients, against time."""
        L, segment, NSEG = self.cut
        if NSEG == 1:
            return Border(initial)
        from linattn.kernels.causal.device.scan import scan
        from linattn.kernels.causal.device.states import states

        N, _, HS, T, K, V = self.sizes
        loop = y.shape[1] // HS
        config = self._config("states", K, V)
        tiles = -(-V // config.BW)
        keys = y is self.k
        mask = self.key_mask if keys else None
        z_gain = 0 if not with_z else 1 if keys else 2 if rows is not None else 0
        # Even if nothing is added on the way, a given sum may pass through. Without sums of keys z is not read.
        z = self._new(N, HS, NSEG, K, zeros=with_z and z_gain == 0)
        kv, kepts = self._new(N, HS, NSEG, K, V), self._new(N, HS, NSEG)
        launch(
            states, N * HS * NSEG * tiles, y, *y.stride(), w, *w.stride(), *(rows or (None, None)),
            *(decay or (None, 0, None)),
            mask, 0 if mask is None else mask.stride(0), self.cu, kv, z, kepts,
            T, segment, NSEG, HS, self._chunks, 1.0,
            Y=K, W=V, BY=padded(K), BW=config.BW, L=L, TILES=tiles, LOOP=loop, REVERSE=reverse,
            DECAY=decay is not None, PACKED=self.cu is not None, MASK=mask is not None,
            SCALE=rows is not None, Z=z_gain, LAST=with_last, WEIGHT=self._weight if keys else 0,
            num_warps=config.warps, num_stages=config.stages, STAGES=config.stages, **self._dot_type("states"),
        )  # fmt: skip
        last = (self._new(N, HS, K, V), self._new(N, HS, K)) if with_last else None
        for part, start, end in zip((kv, z), initial or (None, None), last or (None, None), strict=True):
            if part is z and not with_z:
                continue
            size = part[0, 0, 0].numel()
            block = min(1024, padded(size))
            launch(
                scan, N * HS * -(-size // block), part, kepts, start, end, NSEG,
                SIZE=size, BLOCK=block, BLOCKS=-(-size // block), REVERSE=reverse, DECAY=decay is not None,
                S0=start is not None, S1=end is not None, num_warps=4,
            )  # fmt: skip
        return Border((kv, z), last)

    def sweep(
        self, role: str, x: Tensor, y: Tensor, w: Tensor, out: Tensor, border: Border,
        decay: Gates | None, *, against: bool, den: Tensor | None = None, rows: Rows | None = None,
        u: Tensor | None = None, prev: Tensor | None = None,
        prev_den: Tensor | None = None, divide: bool = True, z: bool = False, marks: Marks | None = None,
        last: tuple[Tensor | None, Tensor | None] = (None, None), made: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """One walk, see the kernel; returns u . out by tiles of columns, if u is given. z: whether to sum keys.

        made: the result of row_factors, for walks that are mild enough; others make their row sums themselves.
        """
        X, W, T = x.shape[3], w.shape[3], x.shape[2]
        # The result is a sum over the features of x; if the state of all features is too large, it is made by parts.
        split = X > SPLIT_AT and role in ("dq", "dk") and (self.tf32 or self.q.dtype == torch.bfloat16)
        part = SPLIT_AT if split else X
        tiles = -(-W // self._config(role, part, W, dots=u is not None).BW)
        # With the shares of the diagonal, if the denominator's gradient is to be corrected by them.
        planes = 3 if role == "dq" and self.norm > 0 and not against else 1
        if role == "dk" and self._weight and not against:
            planes = 2  # the second is for the gradient of the weights
        dots = None if u is None else self._new(planes, -(-X // part) * tiles, x.shape[0], x.shape[1], T)
        for n, lo in enumerate(range(0, X, part)):
            if n > 0:  # the first part has included all that belongs to no feature
                prev, z, last = out, False, (None, None)
            # One launch for decays that are mild enough for the kernel's short form, another for the rest.
            once = decay is None or (self._split and made is None)
            # Row sums that were made before are only for the short form.
            turns = (((0,), made),) if once else (((1, 2), None),) if made is None else (((1,), made), ((2,), None))
            whole = part == X  # then no view is needed, which takes as long as half a launch
            for milds, made_here in turns:
                self._sweep(
                    milds, role, x if whole else x[..., lo : lo + part], y if whole else y[..., lo : lo + part], w, out,
                    border.state, lo, decay, against=against, den=den, rows=rows, extra=n == 0, u=u, prev=prev,
                    prev_den=prev_den, divide=divide, z=z, marks=marks, last=last,
                    dots=dots if dots is None or n == 0 else dots[:, n * tiles :], made=made_here,
                )  # fmt: skip
        return dots

    def _sweep(
        self, milds: tuple[int, ...], role: str, x: Tensor, y: Tensor, w: Tensor, out: Tensor, start: State | None,
        lo: int, decay: Gates | None, *, against: bool, den: Tensor | None, rows: Rows | None, extra: bool,
        u: Tensor | None, prev: Tensor | None, prev_den: Tensor | None, divide: bool, z: bool, marks: Marks | None,
        last: tuple[Tensor | None, Tensor | None], dots: Tensor | None, made: Tensor | None,
    ) -> None:  # fmt: skip
        from linattn.kernels.causal.device.sweep import sweep

        L, segment, NSEG = self.cut
        N, _, HS, T, K, V = self.sizes
        heads, X, W = x.shape[1], x.shape[3], w.shape[3]
        keys = role in ("dk", "dv")  # one row of the output per key: sums over the query heads that share it
        config = self._config(role, X, W, dots=dots is not None)
        tiles = -(-W // config.BW)
        natural = role in ("output", "dv")
        scale, e = rows or (None, None)
        start_kv, start_z = start or (None, None)
        if start_kv is not None and lo:
            start_kv = start_kv[..., lo:]
        if made is not None:
            scale, den, prev_den, z, last = made, None, None, False, (last[0], None)
        mark = (None, None) if marks is None else (marks.kv[:, lo:] if lo else marks.kv, marks.z)
        args = (
            x, *x.stride(), y, *y.stride(), w, *w.stride(), u, *(u.stride() if u is not None else (0, 0, 0, 0)),
            out, den, prev_den, prev, scale, e, dots, *((0, 0) if dots is None else (dots.stride(1), dots.stride(0))),
            *mark, *(decay or (None, 0, None)), self.key_mask, 0 if self.key_mask is None else self.key_mask.stride(0),
            self.cu,
            start_kv, *((V, 1) if natural else (1, V)), last[0], start_z, last[1],
            T, segment, NSEG, heads, HS, self._chunks, 0 if marks is None else marks.places, K * V, self.eps,
        )  # fmt: skip
        constants = dict(
            X=X, W=W, BX=padded(X), BW=config.BW, L=L, TILES=tiles,
            DIV=1 if keys else heads // HS, LOOP=y.shape[1] // HS if keys else 1, REVERSE=against != keys,
            DIAG=2 if against else 1 if u is not None else 0,
            DECAY=decay is not None, PACKED=self.cu is not None,
            MASK_Y=self.key_mask is not None and not keys, MASK_X=self.key_mask is not None and keys,
            DEN=den is not None, NORM=self.norm if den is not None and divide else 0,
            SCALE=3 if made is not None else 0 if rows is None else 2 if keys else 1,
            EXTRA=0 if rows is None or role == "dv" or not extra else 2 if keys else 1,
            ZCOL=role == "output" and z, ZROW=0 if natural or not z else 2 if keys else 1, S0=start is not None,
            S1=last[0] is not None, Z1=last[1] is not None,
            DOTS=0 if dots is None else dots.shape[0],
            MARK=marks is not None, CK=1 if marks is None else marks.stretch // L,
            ADD=prev is not None, SPLIT=self._split, STAGES=config.stages, LEAN=config.lean > 0,
            PARTS=config.parts if role == "output" and z else 0,
            SIDE_BY_SIDE=side_by_side(out), WEIGHT_Y=0 if keys else self._weight, WEIGHT_X=self._weight if keys else 0,
            num_warps=config.warps, num_stages=config.stages, **self._dot_type(role),
        )  # fmt: skip
        for mild in milds:
            launch(sweep, N * heads * NSEG * tiles, *args, **constants, MILD=mild)

    def row_factors(self, sums: Tensor, turns: list[tuple[Border, Gates | None]], last: Tensor | None) -> Tensor | None:
        """1 / n (B, H, T) if row sums have their own kernel; writes sums and the last sum of keys in place.

        turns: the walk along time and, if there is one, the walk against it.
        """
        if not self._config("output", *self.sizes[4:]).apart:
            return None
        walks, parts = [], []
        for against, (border, decay) in enumerate(turns):
            gates, _, keeps = decay or (None, 0, None)
            walk = Walk(
                self.cut, self._chunks, int(decay is not None), None if gates is None else gates[2 - against], keeps,
                None, None if border.state is None else border.state[1], None if against else last, against > 0,
            )  # fmt: skip
            walks.append(walk)
            if gates is not None and self._weight:  # weights are factors of the keys only, not of the rows
                walk = walk._replace(gates=gates[2 - against] * gates[self._weight])
            parts.append(row_sums(launch, self.q, self.k, walk, key_mask=self.key_mask, cu=self.cu))
        return row_factors(launch, sums, walks, parts, self.sizes[2], norm=self.norm, eps=self.eps)

    def marks(self, with_z: bool) -> Marks:
        """Room for the states, or their gradients, that re-anchor the decay's gradient."""
        N, _, HS, T, K, V = self.sizes
        stretch = self._stretch(self.cut[0])
        rows, places = (N, -(-T // stretch)) if self.cu is None else (1, T // stretch + N + 1)
        # fp32, as all states: rounding these to bf16 would by itself change the gradient of a decay per head by 5 %.
        z = self._new(rows * HS * places, K) if with_z else None
        return Marks(stretch, places, self._new(rows * HS * places, V, K), z)

    @property
    def query_gradient_tiles(self) -> int:
        """Number of tiles of columns in a sweep of dq that makes dots."""
        K, V = self.sizes[4:]
        return -(-K // self._config("dq", min(V, SPLIT_AT), K, dots=True).BW)

    def _stretch(self, L: int) -> int:
        """Tokens between two marks, so that all marks in fp32 take an eighth of the memory of q, k, v and the output.

        With fp32 inputs they take a quarter, as the sums between two marks must not cost any digits.
        """
        return max(2 * L, (2 if self.q.dtype == torch.float32 else 8) * padded(max(self.sizes[4:])))

    def _config(self, role: str, X: int, W: int, dots: bool = False) -> Config:
        decay = self.log_decay is not None
        return pick(role, X, W, self.q.dtype, self.q.device, decay=decay, dots=dots, tf32=self.tf32)

    def _with_room(self, *shape: int) -> Tensor:
        """A tensor with a chunk of memory after its end: sweeps read whole chunks and mask afterwards."""
        size = math.prod(shape)
        return self._new(size + self.cut[0])[:size].view(shape)

    def _new(self, *shape: int, zeros: bool = False) -> Tensor:
        make = torch.zeros if zeros else torch.empty
        return make(shape, dtype=torch.float32, device=self.q.device)
