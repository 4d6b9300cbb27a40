"""The passes of hybrid attention: launches of the kernels with their tensors. ``library`` makes them operators."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.causal.widths import reachable
from linattn.kernels.common.launching import launch
from linattn.kernels.common.support import interpreted, multiprocessors
from linattn.kernels.hybrid.config import Tiles, columns, pick
from linattn.ops.hybrid.rows import take

State = tuple[Tensor, Tensor]  # (B, H_kv, chunks, F, V) and (B, H_kv, chunks, F), fp32 and contiguous
SCAN = 128, 8  # numbers per program, chunks that it fetches at once


class Saved(NamedTuple):
    """What the forward pass keeps for the gradients; see its kernel."""

    level: Tensor
    share: Tensor
    best: Tensor


class Slots(NamedTuple):
    """The list of chosen tokens; see ``Listed``."""

    k: Tensor  # (B, H_kv, N, K)
    v: Tensor  # (B, H_kv, N, V)
    features: Tensor | None  # (B, H_kv, N, F), with ``joining``
    begin: Tensor
    end: Tensor
    spans: Tensor
    ends: Tensor
    slots: Tensor
    joining: Tensor | None


@dataclass(frozen=True)
class Passes:
    """One call, with rows that are a whole number of chunks long."""

    q: Tensor  # (B, H, S, K)
    k: Tensor  # (B, H_kv, S, K)
    v: Tensor  # (B, H_kv, S, V)
    phi: Tensor | None  # (B, H, S, F)
    psi: Tensor | None  # (B, H_kv, S, F)
    gate: Tensor | None  # (B, H, S, V)
    chosen: Slots | None
    first: Tensor  # (B,) int32
    chunk: int
    back: int
    window: int
    sliding: bool
    scale: float
    best: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, H_kv, S, K, V, F."""
        B, H, S, K = self.q.shape
        return B, H, self.k.shape[1], S, K, self.v.shape[3], 0 if self.phi is None else self.phi.shape[3]

    @property
    def chunks(self) -> int:
        return self.q.shape[2] // self.chunk

    @cached_property
    def tiles(self) -> Tiles:
        *_, K, V, F = self.sizes
        return pick(self.chunk, K, V, F, self.q.dtype, pairs=self.sliding and self.phi is not None)

    def states(self, initial: State | None) -> State | None:
        """The sums that each chunk of queries reads."""
        if self.psi is None:
            return None
        from linattn.kernels.hybrid.device.states import gains

        _, _, HS, S, _, _, _ = self.sizes
        states, sums = self._room()
        launch(
            gains, self._parts(self.k), *_strided(self.psi), *_strided(self.v), self._of_list("ends"), states, sums,
            S, HS, self.chunks, CHOSEN=self.chosen is not None, **self._shape("V", "F", "L", "R", "BACK"),
        )  # fmt: skip
        if self.chosen is not None and self.chosen.joining is not None:
            psi, v = self._joining(self.chosen)
            states += psi.mT @ v
            sums += psi.sum(3)
        self._run(states, sums, initial, None, reverse=False)
        return states, sums

    def outputs(self, states: State | None, out: Tensor, saved: Saved, eps: float, one: bool) -> None:
        from linattn.kernels.hybrid.device.forward import outputs

        B, H, HS, S, _, _, _ = self.sizes
        launch(
            outputs, B * H * S // self.tiles.L, *_strided(self.q), *_strided(self.k), *_strided(self.v),
            *self._pair(), *_strided(self.gate), *(states or (None, None)), *self._slots(), self._of_list("ends"),
            self.first, out, *saved, S, H, HS, self._listed, self.chunks, self.window, self.scale, eps,
            ONE=one, STAGES=self._stages,
            **self._shape("K", "V", "F", "L", "BN", "R", "BACK", "GROUP", "LINEAR", "SLIDING", "NAMED", "CHOSEN",
                          "GATE", "BEST"),
        )  # fmt: skip

    def query_gradients(
        self, d_out: Tensor, out: Tensor, states: State | None, saved: Saved
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """Gradients of q, phi and the gate; delta and flow."""
        from linattn.kernels.hybrid.device.query_grad import exact_part, linear_part

        B, H, HS, S, _, _, _ = self.sizes
        delta, flow = torch.empty_like(saved.share), torch.empty_like(saved.share)
        d_q = self._like(self.q)
        d_phi = None if self.phi is None else self._like(self.phi)
        d_gate = None if self.gate is None else (self._like if self.phi is not None else torch.zeros_like)(self.gate)
        programs = B * H * S // self.tiles.L
        launch(
            linear_part, programs, *_strided(self.v), *self._pair(), *_strided(self.gate), *_strided(d_out), out,
            *(states or (None, None)), self._of_list("ends"), self.first, saved.share, delta, flow, d_phi, d_gate,
            S, H, HS, self.chunks, self.window,
            **self._shape("V", "F", "L", "R", "BACK", "GROUP", "LINEAR", "SLIDING", "NAMED", "GATE"),
        )  # fmt: skip
        launch(
            exact_part, programs, *_strided(self.q), *_strided(self.k), *_strided(self.v), *_strided(d_out),
            *self._slots(), self._of_list("ends"), self.first, saved.level, delta, flow, saved.best, d_q,
            S, H, HS, self._listed, self.chunks, self.window, self.scale, STAGES=self.tiles.stages,
            **self._shape("K", "V", "L", "BN", "R", "BACK", "GROUP", "SLIDING", "NAMED", "CHOSEN", "BEST"),
        )  # fmt: skip
        return d_q, d_phi, d_gate, delta, flow

    def state_gradients(self, d_out: Tensor, share: Tensor, delta: Tensor, first: State | None) -> State | None:
        """Gradients of what joins the sums after each chunk; writes that of the initial sums to ``first``."""
        if self.phi is None:
            return None
        from linattn.kernels.hybrid.device.states import gradients

        _, H, HS, S, _, _, _ = self.sizes
        states, sums = self._room()
        launch(
            gradients, self._parts(self.k), *_strided(self.phi), *_strided(d_out), *_strided(self.gate), share, delta,
            states, sums, S, H, HS, self.chunks, **self._shape("V", "F", "L", "R", "GROUP", "GATE"),
        )  # fmt: skip
        self._run(states, sums, None, first, reverse=True)
        return states, sums

    def list_gradients(
        self, d_out: Tensor, saved: Saved, delta: Tensor, flow: Tensor, d_states: State | None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Gradients of keys, values and features of the list, fp32."""
        if self.chosen is None:
            return None
        from linattn.kernels.hybrid.device.key_grad import chosen

        B, H, HS, S, K, V, _ = self.sizes
        N, slots = self._listed, self.chosen
        programs = B * HS * N // self.tiles.BN
        parts = max(1, min(2 * multiprocessors(self.q.device) // programs, S // (4 * self.tiles.L)))
        dk, dv = (self._new(parts, B, HS, N, width) for width in (K, V))
        launch(
            chosen, programs * parts, *_strided(self.q), *_strided(d_out), slots.k, slots.v, slots.begin, slots.end,
            saved.level, delta, flow, saved.best, dk, dv, S, H, HS, N, self.chunks, parts, self.scale,
            STAGES=self.tiles.stages, **self._shape("K", "V", "L", "BN", "R", "GROUP", "BEST"),
        )  # fmt: skip
        dk, dv = (x[0] if parts == 1 else x.sum(0) for x in (dk, dv))
        if slots.joining is None or d_states is None:
            return dk, dv, None
        psi, v = self._joining(slots)
        states, sums = d_states
        there = (slots.joining >= 0).unsqueeze(-1)
        target = torch.where(slots.joining >= 0, slots.joining, N).flatten(2).unsqueeze(-1)

        def onto_slots(x: Tensor) -> Tensor:  # every token joins once
            x = (x * there).flatten(2, 3)
            return x.new_zeros(B, HS, N + 1, x.shape[3]).scatter(2, target.expand(x.shape), x)[:, :, :N]

        return dk, dv + onto_slots(psi @ states), onto_slots(v @ states.mT + sums.unsqueeze(3)).contiguous()

    def key_gradients(
        self, d_out: Tensor, saved: Saved, delta: Tensor, flow: Tensor, d_states: State | None,
        of_list: tuple[Tensor, Tensor, Tensor | None] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of k, v and psi."""
        from linattn.kernels.hybrid.device.key_grad import features, keys

        B, H, HS, S, _, _, F = self.sizes
        d_k, d_v = self._like(self.k), self._like(self.v)
        d_psi = None if self.psi is None else self._like(self.psi)
        dk, dv, dpsi = of_list or (None, None, None)
        states, sums = d_states or (None, None)
        tiles, slots = B * HS * S // self.tiles.L, self._of_list("slots")
        launch(
            keys, tiles, *_strided(self.q), *_strided(self.k), *_strided(self.v), *self._pair(), *_strided(self.gate),
            *_strided(d_out), states, dk, dv, slots, self._of_list("ends"), self.first,
            saved.level, saved.share, delta, flow, saved.best, d_k, d_v,
            S, H, HS, self._listed, self.chunks, self.window, self.scale, STAGES=self._stages,
            **self._shape("K", "V", "F", "L", "R", "BACK", "GROUP", "LINEAR", "SLIDING", "NAMED", "CHOSEN", "GATE",
                          "BEST"),
        )  # fmt: skip
        if d_psi is not None:
            launch(
                features, tiles * -(-F // self.tiles.BF), *_strided(self.v), *_strided(self.phi), *_strided(self.gate),
                *_strided(d_out), states, sums, dpsi, slots, self._of_list("ends"), self.first, saved.share, delta,
                d_psi, S, H, HS, self._listed, self.chunks, self.window, ENDING=dpsi is not None,
                **self._shape("V", "F", "L", "R", "BACK", "GROUP", "SLIDING", "NAMED", "CHOSEN", "GATE"),
            )  # fmt: skip
        return d_k, d_v, d_psi

    def _run(self, states: Tensor, sums: Tensor, start: State | None, end: State | None, *, reverse: bool) -> None:
        """Turn what each chunk adds into the sums before it, or with ``reverse`` after it, in place."""
        from linattn.kernels.hybrid.device.states import running

        B, _, HS = self.sizes[:3]
        for x, first, last in zip((states, sums), start or (None, None), end or (None, None), strict=True):
            size = x[0, 0, 0].numel()
            blocks = -(-size // SCAN[0])
            launch(
                running, B * HS * blocks, x, first, last, self.chunks, size, blocks, BLOCK=SCAN[0], AHEAD=SCAN[1],
                REVERSE=reverse, S0=first is not None, S1=last is not None, num_warps=4,
            )  # fmt: skip

    def _joining(self, chosen: Slots) -> tuple[Tensor, Tensor]:
        """Features and values of tokens that stop being exact, ``(B, H_kv, chunks, E, .)`` in fp32; zeros for none."""
        assert chosen.joining is not None
        assert chosen.features is not None
        place = chosen.joining.clamp(min=0).flatten(2)
        psi, v = (take(x, place).unflatten(2, chosen.joining.shape[2:]).float() for x in (chosen.features, chosen.v))
        return psi * (chosen.joining >= 0).unsqueeze(-1), v

    @property
    def _stages(self) -> int:
        """Stages of loops; a sliding window with a linear part has one, as gated tiles are not fetched ahead."""
        return 1 if self.sliding and self.phi is not None else self.tiles.stages

    @property
    def _listed(self) -> int:
        return 0 if self.chosen is None else self.chosen.k.shape[2]

    def _parts(self, like: Tensor) -> int:
        return like.shape[0] * like.shape[1] * self.chunks * -(-self.sizes[6] // self.tiles.BF)

    def _pair(self) -> tuple[Any, ...]:
        return *_strided(self.phi), *_strided(self.psi)

    def _slots(self) -> tuple[Tensor | None, ...]:
        c = self.chosen
        return (None,) * 5 if c is None else (c.k, c.v, c.begin, c.end, c.spans)

    def _of_list(self, name: str) -> Tensor | None:
        return None if self.chosen is None else getattr(self.chosen, name)

    def _shape(self, *names: str) -> dict[str, Any]:
        """The named constants of a kernel, and how it multiplies."""
        _, H, HS, _, K, V, F = self.sizes
        t, dtype = self.tiles, self.q.dtype
        known = {
            "K": K, "V": V, "F": F, "L": t.L, "BN": t.BN, "R": self.chunk // t.L, "BACK": self.back,
            "GROUP": H // HS, "LINEAR": self.phi is not None, "SLIDING": self.sliding,
            "NAMED": self.sliding and self.chosen is not None, "CHOSEN": self.chosen is not None,
            "GATE": self.gate is not None, "BEST": self.best,
        }  # fmt: skip
        widths = {"K": ("BK", columns(K)), "V": ("BV", columns(V)), "F": ("BF", t.BF)}
        # The interpreter multiplies the bits of bf16 as integers.
        bf16 = dtype == torch.bfloat16 and not interpreted()
        return {
            **{name: known[name] for name in names}, **dict(widths[name] for name in names if name in widths),
            "BF16": bf16, "PREC": "ieee" if dtype == torch.float32 else "tf32", "num_warps": t.warps,
            "num_stages": t.stages,
        }  # fmt: skip

    def _room(self) -> State:
        B, _, HS, _, _, V, F = self.sizes
        return self._new(B, HS, self.chunks, F, V), self._new(B, HS, self.chunks, F)

    def _like(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)


def _strided(x: Tensor | None) -> tuple[Any, ...]:
    return (None, 0, 0, 0) if x is None else (x, *x.stride()[:3])


def readable(x: Tensor) -> Tensor:
    """x, or a copy that kernels can read, with contiguous rows."""
    return reachable(x) if x.stride(3) == 1 else x.contiguous()
