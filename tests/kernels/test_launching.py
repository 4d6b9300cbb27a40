"""Remembered launches: never a kernel that was compiled for other arguments, and ordinary launches where one is due."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import nn

from kernels.device import DEVICE
from linattn.kernels.common import launching
from linattn.kernels.common.launching import described
from linattn.kernels.common.support import interpreted

BUFFER = torch.zeros(64, device=DEVICE)  # 16-byte aligned; its views from other numbers are not
CONSTANTS = {"BLOCK": 16, "HAS": True, "num_warps": 4}


def kernel_body(x, y, n, eps, free, BLOCK, HAS):
    """Nothing runs it: only its signature is read."""


# (args, constants): neighbours differ in one respect that may ask for another kernel.
FAMILY: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((x, y, n, eps, free), CONSTANTS | changed)
    for x in (BUFFER, BUFFER[4:], BUFFER[1:], BUFFER.half(), BUFFER[:0])
    for y in (None, BUFFER, BUFFER[2:])
    for n in (1, 3, 16, 32, 2**31, 2**63, True)
    for eps in (0.5, 1.0, 1)
    for free in (1, 16)
    for changed in ({}, {"BLOCK": 32}, {"HAS": 1}, {"HAS": None}, {"HAS": 1.0}, {"HAS": tl.float32},
                    {"HAS": tl.float16}, {"num_warps": 8})
]  # fmt: skip


def test_equal_keys_are_one_kernel_for_triton() -> None:
    """Against what Triton itself makes of the arguments: its key may be coarser than ours, never finer."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, KernelParam, create_function_from_signature

    for constant in ("BLOCK", "HAS"):
        kernel_body.__annotations__[constant] = "constexpr"
    kernel = JITFunction(kernel_body, do_not_specialize=["free"])
    assert all(isinstance(param, KernelParam) for param in kernel.params)
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    theirs: dict[tuple[Any, ...], str] = {}
    for args, constants in FAMILY:
        _, specialization, options = binder(*args, **constants)
        wanted = str(specialization) + str(options)
        assert theirs.setdefault(described(args, constants)[0], wanted) == wanted, (args, constants)
    # Of the 5040 calls, those that Triton tells apart: were there few, equality would prove nothing.
    assert len(set(theirs.values())) > 500


class Compiled:
    """What ``run`` was given goes to ``launched``."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launched: list[Any]) -> None:
        self.launched = launched

    def run(self, *args: Any) -> None:
        self.launched.append(args)


class Kernel:
    """Stands for Triton's; an ordinary launch compiles anew and is noted as its arguments."""

    arg_names, pre_run_hooks, debug = ["x", "n", "BLOCK", "HAS"], [], None

    def __init__(self) -> None:
        self.fn = object()
        self.ordinary: list[Any] = []
        self.remembered: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.ordinary.append((grid, args, constants))
            return Compiled(self.remembered)

        return run


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver whose current device is that of BUFFER, and nobody who watches."""
    driver = SimpleNamespace(get_current_device=BUFFER.get_device, get_current_stream=lambda device: "stream")
    runtime = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None, debug=False, add_stages_inspection_hook=None
    )
    knobs = SimpleNamespace(runtime=runtime, compilation=SimpleNamespace(instrumentation_mode=""))
    found = SimpleNamespace(
        JITFunction=Kernel, CompiledKernel=Compiled, driver=SimpleNamespace(active=driver), knobs=knobs
    )
    monkeypatch.setattr(launching, "internals", lambda: found)
    monkeypatch.setattr(launching, "_remembered", {})
    return found


def test_an_equal_launch_goes_to_the_driver(triton: Any) -> None:
    kernel = Kernel()
    launching.launch(kernel, 7, BUFFER, 16, HAS=True, BLOCK=16, num_warps=4)
    launching.launch(kernel, 9, BUFFER[4:], 16, HAS=True, BLOCK=16, num_warps=4)
    assert kernel.ordinary == [((7,), (BUFFER, 16), {"HAS": True, "BLOCK": 16, "num_warps": 4})]
    # Grid, stream, function, metadata, no hooks; the address of this tensor; constants in the order of parameters.
    address = BUFFER[4:].data_ptr()
    assert kernel.remembered == [(9, 1, 1, "stream", "function", "metadata", None, None, None, address, 16, 16, True)]
    launching.launch(kernel, 0, BUFFER, 17, HAS=True, BLOCK=16, num_warps=4)
    assert len(kernel.ordinary) == 1  # no program, no launch


@pytest.mark.parametrize("constant", [tl.bfloat16, -60.0, "ieee", None])
def test_constants_may_be_types_and_numbers(triton: Any, constant: Any) -> None:
    kernel = Kernel()
    for _ in range(3):
        launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS | {"HAS": constant})
    assert (len(kernel.ordinary), len(kernel.remembered)) == (1, 2)
    assert kernel.remembered[0][-1] == constant


@pytest.mark.parametrize(
    ("args", "constants"),
    [((BUFFER[1:], 16), {}), ((BUFFER.half(), 16), {}), ((BUFFER.bfloat16(), 16), {}), ((None, 16), {}),
     ((BUFFER, 1), {}), ((BUFFER, 17), {}), ((BUFFER, True), {}), ((BUFFER, 16.0), {}),
     ((BUFFER, 16), {"BLOCK": 32}), ((BUFFER, 16), {"HAS": 1}), ((BUFFER, 16), {"HAS": 1.0}),
     ((BUFFER, 16), {"HAS": tl.float32}), ((BUFFER, 16), {"num_warps": 8})],
)  # fmt: skip
def test_another_launch_is_triton_s(triton: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel, other = Kernel(), Kernel()
    launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS)
    launching.launch(other, 1, BUFFER, 16, **CONSTANTS)
    if args[0] is None:  # a device is needed to launch on
        assert described(args, CONSTANTS)[0] != described((BUFFER, 16), CONSTANTS)[0]
        return
    launching.launch(kernel, 1, *args, **CONSTANTS | constants)
    assert (len(kernel.ordinary), len(kernel.remembered)) == (2, 0)
    assert (len(other.ordinary), len(other.remembered)) == (1, 0)


def test_parameters_are_tensors_and_subclasses_are_not(triton: Any) -> None:
    class Watched(torch.Tensor):
        pass

    kernel, weight = Kernel(), nn.Parameter(BUFFER)
    for _ in range(2):
        launching.launch(kernel, 1, weight, 16, **CONSTANTS)
    assert (len(kernel.ordinary), len(kernel.remembered)) == (1, 1)
    for _ in range(2):
        launching.launch(kernel, 1, BUFFER.as_subclass(Watched), 16, **CONSTANTS)
    assert (len(kernel.ordinary), len(kernel.remembered)) == (3, 1)


def test_who_watches_sees_ordinary_launches(triton: Any) -> None:
    kernel, runtime = Kernel(), triton.knobs.runtime
    launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS)
    runtime.launch_enter_hook.calls.append(print)
    launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS)
    runtime.launch_enter_hook.calls.clear()
    runtime.debug = True
    launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS)
    runtime.debug = False
    triton.knobs.compilation.instrumentation_mode = "fpsan"
    launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS)
    assert (len(kernel.ordinary), len(kernel.remembered)) == (4, 0)


def test_what_the_key_does_not_tell_is_not_remembered(triton: Any) -> None:
    """Tensors of another device than the current one, constants of 0.0, and what Triton did not compile."""
    kernel, driver = Kernel(), triton.driver.active
    for constants in (CONSTANTS | {"BLOCK": 0.0}, CONSTANTS | {"BLOCK": -0.0}):
        launching.launch(kernel, 1, BUFFER, 16, **constants)
    elsewhere = BUFFER.cpu()  # a tensor of another GPU would make that one the current one
    driver.get_current_device = lambda: 5
    for _ in range(2):
        launching.launch(kernel, 1, elsewhere, 16, **CONSTANTS)
    driver.get_current_device = BUFFER.get_device
    triton.CompiledKernel = object
    launching.launch(kernel, 1, BUFFER, 16, **CONSTANTS)
    assert (len(kernel.ordinary), len(launching._remembered)) == (5, 0)


def test_memory_is_bounded(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST", 3)
    kernel = Kernel()
    for length in range(2, 12):
        launching.launch(kernel, 1, BUFFER, length, **CONSTANTS)
        assert 0 < len(launching._remembered) <= 3


@pytest.mark.skipif(not interpreted(), reason="without the interpreter kernels are compiled")
def test_the_interpreter_has_ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.kernels.bidirectional.device.sum import bidirectional_sum

    monkeypatch.setattr(launching, "_remembered", {})
    for turn in range(2):
        total, parts = torch.full((8,), torch.nan), torch.arange(16.0).view(2, 8)
        launching.launch(bidirectional_sum, 1, parts, total, total, 8, 2, HAS_INITIAL=False, BLOCK=16, num_warps=1)
        assert torch.equal(total, parts.sum(0)), turn
    assert not launching._remembered


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="remembered launches are those of a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_remembered_launches_compute_the_same(dtype: torch.dtype) -> None:
    """Views that start at other bytes come between: each must find its own kernel."""
    from linattn import linear_attention

    buffer = torch.randn(3, 2 * 2 * 80 * 64 + 8, device=DEVICE, dtype=dtype)

    def outcome(first: int, causal: bool) -> list[torch.Tensor]:
        leaves = [x[first : first + 2 * 2 * 80 * 64].view(2, 2, 80, 64).detach().requires_grad_() for x in buffer]
        out = linear_attention(*leaves, causal=causal, normalizer=None, impl="triton")
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    calls = [(first, causal) for first in (0, 1, 8) for causal in (False, True)]
    launching.forget()
    ordinary = [outcome(*call) for call in calls]
    known = len(launching._remembered)
    assert known > 0
    for call, expected in zip(calls, ordinary, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outcome(*call), expected, strict=True)), call
    assert len(launching._remembered) == known
