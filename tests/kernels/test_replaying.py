"""Replayed operators: what a script computes is what the call computes, for inputs that lie elsewhere."""

import ctypes
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kernels.device import DEVICE
from linattn import create_mechanism, linear_attention
from linattn.kernels.causal import config
from linattn.kernels.causal.library import _backward as causal_backward
from linattn.kernels.causal.library import _forward as causal_forward
from linattn.kernels.common import launching, replaying, scripts
from linattn.kernels.common.launching import launch
from linattn.kernels.common.replaying import Allocation, Launch, Script, replayed
from linattn.kernels.common.support import interpreted
from linattn.testing.poison import poisoned_allocations

T, D = 40, 16


class Compiled:
    """Runs an interpreted kernel as the driver runs a compiled one: on addresses."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in args]

    def run(self, programs: int, *rest: Any) -> None:
        values = rest[8:]
        args = [x if dtype is None else at(x, dtype) for x, dtype in zip(values, self.dtypes, strict=False)]
        names = self.kernel.arg_names[len(args) :]
        with _disable_current_modes():
            self.kernel[(programs,)](*args, **dict(zip(names, values[len(args) :], strict=True)))


def at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor at the address: the interpreter takes nothing else, and reads where the kernel tells it to."""
    if address == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Makes the interpreter look like a GPU; the kernels that it compiled."""
    from linattn.kernels.bidirectional.device.sum import bidirectional_sum

    made: list[Compiled] = []
    ordinarily = launching._launch_ordinarily

    def compile_and_launch(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Compiled:
        with _disable_current_modes():  # the interpreter computes with tensors, a GPU does not
            ordinarily(kernel, programs, args, constants)
        made.append(Compiled(kernel, args))
        return made[-1]

    driver = SimpleNamespace(get_current_device=lambda: -1, get_current_stream=lambda device: None)
    triton = SimpleNamespace(
        JITFunction=type(bidirectional_sum), CompiledKernel=Compiled, driver=SimpleNamespace(active=driver), knobs=None
    )
    monkeypatch.setattr(launching, "internals", lambda: triton)
    monkeypatch.setattr(launching, "_launch_ordinarily", compile_and_launch)
    monkeypatch.setattr(launching, "is_watched", lambda knobs, kernel=None: False)
    monkeypatch.setattr(launching, "_remembered", {})
    monkeypatch.setattr(replaying, "is_on_gpu", lambda x: True)
    replaying.forget()
    yield made
    replaying.forget()


needs_interpreter = pytest.mark.skipif(not interpreted(), reason="the interpreter stands for a GPU here")


def add(first: Tensor, second: Tensor | None, out: Tensor) -> None:
    from linattn.kernels.bidirectional.device.sum import bidirectional_sum

    given = {"HAS_INITIAL": second is not None, "BLOCK": 16, "num_warps": 1}
    launch(bidirectional_sum, 1, first, out if second is None else second, out, 8, 1, **given)


def sums(x: Tensor, part: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """``x + part`` in rows, and ``x + part (+ 2 part)``: through memory that is let go, seen from two places."""
    room, total = x.new_empty((2, 8)), x.new_empty((8,))
    add(x, part, room[1])
    add(part, part, room[0])
    add(room[1], room[0] if times == 2 else None, total)
    found = x.new_empty((8,))
    add(room[1], None, found)
    return found.view(2, 4), total


def ends(x: Tensor, part: Tensor) -> Tensor:
    """``x + part`` of the last eight numbers: views of the inputs."""
    out = x.new_empty((8,))
    add(x[-8:], part[-8:], out)
    return out


@needs_interpreter
def test_a_script_computes_on_other_inputs(compiled: list[Compiled]) -> None:
    run, buffer = replayed(sums), torch.arange(64.0)
    for first, times in ((0, 2), (8, 2), (16, 2), (1, 2), (24, 1), (32, 2), (40, 1), (9, 2), (17, 2), (5, 1), (8, 1)):
        x, part = buffer[first : first + 8], buffer[first + 16 : first + 24].clone()
        found, total = run(x, part, times)
        assert torch.equal(found, (x + part).view(2, 4))
        assert torch.equal(total, x + part + (2 * part if times == 2 else 0))
    # Kernels of aligned inputs, of one that is not, and of a constant that differs; a script of each of three calls.
    assert len(compiled) == 3
    scripts = [script for known in replaying._all_scripts for script in known.values()]
    assert [len(script.steps) for script in scripts if isinstance(script, Script)] == [7, 7, 7]


@needs_interpreter
def test_results_keep_their_strides(compiled: list[Compiled]) -> None:
    """Memory in an order of its own, and a whole view in another one, are handed out so again; a part has no script."""

    def turned(x: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        out, room = x.new_empty_strided((2, 4), (1, 2)), x.new_empty((2, 4))
        add(x, part, out)
        add(part, part, room)
        return out, room

    run, buffer = replayed(turned), torch.arange(64.0)
    for n in range(4):
        x, part = buffer[8 * n : 8 * n + 8].clone(), buffer[n : n + 8].clone()
        out, room = run(x, part)
        assert (out.stride(), room.stride()) == ((1, 2), (4, 1))
        assert torch.equal(out, (x + part).view(4, 2).t())
        assert torch.equal(room, (part + part).view(2, 4))
    assert [type(script) for script in replaying._all_scripts[-1].values()] == [Script]
    whole = lambda out, room: (out.t(), room)  # noqa: E731
    parts = lambda out, room: (out, room[:1])  # noqa: E731
    for view, kind in ((whole, Script), (parts, str)):
        other = replayed(lambda x, part, view=view: view(*turned(x, part)))
        for _ in range(3):
            found, expected = other(x, part), view(*turned(x, part))
            assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))
        assert [type(script) for script in replaying._all_scripts[-1].values()] == [kind]


@needs_interpreter
def test_inputs_that_share_memory(compiled: list[Compiled]) -> None:
    """One tensor twice, then two of the same looks; parts of one, then parts of others."""
    run, buffer = replayed(sums), torch.arange(64.0)
    x, y = buffer[:8].clone(), buffer[8:16].clone()
    for pair in [(x, x), (x, x), (x, y), (y, x), (buffer[:8], buffer[8:16]), (buffer[8:16], buffer[:8]), (y, y)] * 2:
        assert torch.equal(run(*pair, 2)[1], pair[0] + 3 * pair[1])
    run = replayed(ends)
    x, y = buffer[:16].clone(), buffer[16:32].clone()
    apart, packed = [(x, y), (y, x), (buffer[32:48], x)], [(buffer[:16], buffer[16:32]), (buffer[16:32], buffer[:16])]
    for pair in packed + apart + packed:
        assert torch.equal(run(*pair), pair[0][8:] + pair[1][8:])


@needs_interpreter
@pytest.mark.parametrize("more", [torch.sum, torch.clone, torch.Tensor.zero_, lambda x: x[0].item()])
def test_a_call_that_computes_has_no_script(compiled: list[Compiled], more: Any) -> None:
    def other(x: Tensor, part: Tensor, times: int) -> Tensor:
        found = sums(x, part, times)[1]
        more(found)
        return found

    run = replayed(other)
    for n in range(3):
        x = torch.full((8,), float(n))
        assert torch.equal(run(x, x + 1, 2), other(x, x + 1, 2))
    assert list(replaying._all_scripts[-1].values()) == [replaying.IMPOSSIBLE]


@needs_interpreter
@pytest.mark.parametrize("norm", [0, 1])
def test_causal_passes_by_scripts(compiled: list[Compiled], norm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned decays in segments: all that the passes do, on tensors that none of the first call is.

    Results lie in memory as the inputs do: with the heads of a token side by side, and contiguous.
    """
    generator = torch.Generator().manual_seed(1)

    def call(seed: int) -> list[Tensor]:
        generator.manual_seed(seed)
        q, k, v = (torch.rand(1, T, 2, D, generator=generator).transpose(1, 2) for _ in range(3))
        k = k.contiguous()
        a, d = -torch.rand(1, 2, T, generator=generator), torch.rand(1, 2, T, D, generator=generator)
        inputs = q, k, v, None, None, a, None, None
        out, den, *_ = causal_forward(*inputs, False, norm, 1e-6, torch.float32, False, False, None)
        more = causal_backward(d, None, None, *inputs, out, den, False, norm, 1e-6, False, True, None, False)
        return [out, den, *more]

    first, second = call(0), call(5)
    known, followed, follow = len(compiled), [], replaying.follow
    monkeypatch.setattr(replaying, "follow", lambda *args: followed.append(args) or follow(*args))
    found = call(0)
    assert (len(compiled), len(followed)) == (known, 2)  # nothing was launched but by scripts
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, first, strict=True))
    monkeypatch.setattr(config, "TRIAL", {"output": {"warps": 4}})
    assert all(torch.equal(a, b) for a, b in zip(call(5), second, strict=True))
    assert len(compiled) > known  # who tries other settings gets them
    steps = [step for known in replaying._all_scripts for script in known.values() for step in script.steps]
    assert {type(step) for step in steps} == {Allocation, Launch}


@needs_interpreter
@pytest.mark.parametrize("name", ["relu", "nala"])
def test_mechanisms_have_scripts_of_both_passes(compiled: list[Compiled], name: str) -> None:
    """A map whose numbers are made into a table inside the operator would have none."""
    mechanism = create_mechanism(name, num_heads=2, head_dim=D, impl="triton")
    leaves = [torch.rand(1, 2, T, D, requires_grad=True) for _ in range(3)]
    for _ in range(2):
        torch.autograd.grad(mechanism(*leaves).sum(), leaves)
    scripts = [script for known in replaying._all_scripts for script in known.values()]
    assert [type(script) for script in scripts] == [Script, Script]


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "options"),
    [("retention", {}), ("gated", {"gate": "head"}), ("gated", {"gate": "channel"}), ("mlstm", {})],
    ids=["retention", "gated by head", "gated by channel", "mlstm"],
)
def test_decoders_have_scripts_of_both_passes(
    compiled: list[Compiled], name: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few heads and a sequence in segments: their states, too, are made without a filled tensor and never read fresh.

    One call is made of ordinary launches, one is written down, one follows; all on memory that is NaN.
    """
    from linattn.kernels.channel_decay.device import plan
    from linattn.kernels.exponential import config as exponential_config

    monkeypatch.setattr(config, "SHORTEST_SEGMENT", 64)
    monkeypatch.setattr(exponential_config, "SHORTEST_SEGMENT", 64)
    monkeypatch.setattr(plan, "_SHORTEST", 64)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 128, D, generator=generator).requires_grad_() for _ in range(3))
    x, d_out = torch.randn(1, 128, D, generator=generator), torch.randn(1, 1, 128, D, generator=generator)
    mechanism = create_mechanism(name, num_heads=1, head_dim=D, causal=True, impl="triton", **options)
    leaves = [q, k, v, *mechanism.parameters()]

    def call() -> list[Tensor]:
        out = mechanism(q, k, v, x=x if mechanism.info.uses_input else None)
        return [out, *torch.autograd.grad(out, leaves, d_out)]

    with poisoned_allocations():
        first = call()
        known = len(compiled)
        later = [call(), call()]
    assert len(compiled) == known
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for found in later for a, b in zip(found, first, strict=True))
    found = [script for known in replaying._all_scripts for script in known.values()]
    assert [type(script) for script in found] == [Script, Script]
    # States of segments are made by one kernel and read by another: that piece is shared, and no script fills it.
    assert all(len(script.places) > 3 and script.room > 0 for script in found)


def test_pieces_of_shared_memory_that_are_used_at_once_lie_apart() -> None:
    draw = random.Random(0)
    for _ in range(200):
        numbers = range(draw.randrange(1, 12))
        sizes = {n: 512 * draw.randrange(5) for n in numbers}
        lives = {n: tuple(sorted((draw.randrange(20), draw.randrange(20)))) for n in numbers}
        places = scripts.packed(sizes, lives)
        assert places.keys() == sizes.keys()
        at_once = [sum(sizes[n] for n in numbers if lives[n][0] <= step <= lives[n][1]) for step in range(20)]
        room = max(places[n] + sizes[n] for n in numbers)
        assert max(at_once) <= room <= 2 * max(at_once)
        for step in range(20):
            there = sorted((places[n], places[n] + sizes[n]) for n in numbers if lives[n][0] <= step <= lives[n][1])
            there = [piece for piece in there if piece[0] < piece[1]]
            assert all(end <= begin for (_, end), (begin, _) in pairwise(there))


@needs_interpreter
def test_large_and_filled_memory_is_not_shared(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(x: Tensor, part: Tensor) -> Tensor:
        minus, large, small = x.new_full((8,), -1.0), x.new_empty((2, 8)), x.new_empty((8,))
        add(x, minus, large[1])
        add(large[1], part, small)
        out = x.new_empty((8,))
        add(small, x, out)
        return out

    monkeypatch.setattr(scripts, "LARGEST", 32)
    monkeypatch.setattr(scripts, "PIECE", 16)
    run, buffer = replayed(filled), torch.arange(64.0)
    for n in range(4):
        x, part = buffer[8 * n : 8 * n + 8].clone(), buffer[n : n + 8].clone()
        with poisoned_allocations():
            assert torch.equal(run(x, part), 2 * x + part - 1)
    (script,) = replaying._all_scripts[-1].values()
    # Of minus, large, small and out, which come after both inputs: large is let go after the second kernel.
    assert (script.places, script.room) == ({4: 0}, 32)
    assert script.last_uses == {3: (2,), 4: (3,)}


@needs_interpreter
@pytest.mark.parametrize("causal", [False, True])
def test_tensors_of_a_subclass_run_as_they_are(causal: bool) -> None:
    class Own(Tensor):
        pass

    plain = torch.rand(3, 1, 2, T, D)
    found = linear_attention(*plain.as_subclass(Own).unbind(), causal=causal, impl="triton")
    assert type(found) is Own
    assert torch.equal(found.as_subclass(Tensor), linear_attention(*plain.unbind(), causal=causal, impl="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2, 2, 80, 64), (1, 2, 600, 32), (1, 2, 2048, 64)])
def test_scripts_compute_the_same_on_a_gpu(shape: tuple[int, ...]) -> None:
    """Bidirectional, and causal with decays per head, token and channel; the longest in segments."""
    decays = {"head": shape[1:2], "token": shape[:3], "channel": shape}

    def outcome(seed: int, kind: str) -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        leaves = [torch.randn(shape, device=DEVICE, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
        decay = None
        if kind in decays:
            decay = -torch.rand(decays[kind], device=DEVICE, generator=generator)
            leaves += [decay.requires_grad_()] if kind != "head" else []
        out = linear_attention(*leaves[:3], causal=kind in decays, log_decay=decay, normalizer=None, impl="triton")
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    calls = [(seed, kind) for seed in range(3) for kind in ("bidirectional", *decays)]
    expected = []
    for call in calls:
        replaying.forget()
        expected.append(outcome(*call))
    for call, want in list(zip(calls, expected, strict=True)) * 3:
        assert all(torch.equal(a, b) for a, b in zip(outcome(*call), want, strict=True)), call
    found = [script for known in replaying._all_scripts for script in known.values()]
    assert sum(isinstance(script, Script) for script in found) >= 6  # of both passes of each decay
