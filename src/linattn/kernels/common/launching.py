"""Launches of Triton kernels that remember which compiled kernel served arguments like these.

Triton finds out in every launch, argument by argument, which of its compiled kernels fits. That takes 25 to 60 us of
the host's time for kernels of eighty arguments, while many of them run for less. The answer depends only on the
arguments, so a launch whose arguments equal those of an earlier one goes straight to the driver here. Equal means:
numbers and constants of the same type and value, tensors of the same dtype, device and address modulo 16 bytes. This
distinguishes more cases than Triton does, never fewer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.kernels.common.support import TRITON, Version

# Releases whose launcher is called as below; others get ordinary launches.
KNOWN_RELEASES: tuple[Version, Version] = (3, 6), (3, 10)
# Bytes: Triton compiles another kernel for pointers that are not a multiple of it.
ALIGNMENT = 16
# How many launches are remembered: every length of a sequence is one more. Beyond that all are forgotten.
MOST = 4096
# Types of plain tensors; launches with others (of a mode, of a subclass) are left to Triton.
PLAIN = frozenset((Tensor, nn.Parameter))


class Remembered(NamedTuple):
    """A compiled kernel, and the values of its constants in the order of its parameters."""

    compiled: Any
    constants: tuple[Any, ...]


_remembered: dict[tuple[Any, ...], Remembered] = {}


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """``kernel[(programs,)](*args, **constants)`` on the device of the tensors; nothing if there are no programs.

    args: tensors (or None) and numbers, by position, before all constants. constants: by name, including Triton's own
    (num_warps ..).
    """
    if programs == 0:
        return
    triton = internals()
    if triton is None or type(kernel) is not triton.JITFunction or is_watched(triton.knobs, kernel):
        _launch_ordinarily(kernel, programs, args, constants)
        _tell(None, programs, args)
        return
    driver = triton.driver.active
    device = driver.get_current_device()
    key, values = described(args, constants)
    key = (kernel.fn, device, *key)
    found = _remembered.get(key)
    if found is None:
        like = _first_tensor(args)
        if like.is_cuda and like.get_device() != device:
            with torch.cuda.device(like.device):
                launch(kernel, programs, *args, **constants)
            return
        compiled = _launch_ordinarily(kernel, programs, args, constants)
        if type(compiled) is triton.CompiledKernel and can_remember(args, constants, device):
            if len(_remembered) >= MOST:
                _remembered.clear()
            names = kernel.arg_names[len(args) :]
            found = _remembered[key] = Remembered(compiled, tuple(constants[name] for name in names))
    else:
        run(found, programs, values, driver.get_current_stream(device))
    _tell(found, programs, args)


def run(known: Remembered, programs: int, values: list[Any], stream: Any) -> None:
    """Run the compiled kernel by the driver. values: its arguments before the constants, with addresses for tensors."""
    launcher, given = prepared(known, programs, values, stream)
    launcher(*given)


# Places of the stream and of the first argument in what a launcher is given.
STREAM, FIRST = 3, 9


def prepared(known: Remembered, programs: int, values: list[Any], stream: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """The launcher of a compiled kernel, and the arguments it is given; without hooks."""
    compiled, constants = known
    function, metadata = compiled.function, compiled.packed_metadata
    return compiled.run, (programs, 1, 1, stream, function, metadata, None, None, None, *values, *constants)


def described(args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """The key of a compiled kernel: all it depends on; and the arguments for the driver, with addresses for tensors."""
    key, values = list(args), list(args)
    for n, x in enumerate(args):
        if type(x) in PLAIN:
            values[n] = address = x.data_ptr()
            key[n] = x.dtype
            key += (address % ALIGNMENT, x.get_device())
    given = constants.values()
    # The key includes types, because True, 1 and 1.0 are equal.
    return (*key, *map(type, args), *constants, *given, *map(type, given)), values


def can_remember(args: tuple[Any, ...], constants: dict[str, Any], device: int) -> bool:
    """Whether the key says everything: plain numbers, known types of constants, plain tensors on the current device.

    The driver does not check whether the device can read an address. The constant 0.0 is not plain, as it equals -0.0.
    """
    from triton.language import dtype  # type: ignore[import-untyped]

    tensors = [x for x in args if type(x) in PLAIN]
    known = all(x is None or type(x) in (int, float) or type(x) in PLAIN for x in args)
    given = constants.values()
    named = all(x is None or type(x) in (int, bool, str, dtype) or (type(x) is float and abs(x) > 0) for x in given)
    return known and named and all(x.get_device() == device for x in tensors)


_listening = local()


@contextmanager
def listener(recorder: Any) -> Iterator[None]:
    """Report every launch of this thread to the recorder: ``launched(remembered or None, programs, args)``."""
    _listening.recorder = recorder
    try:
        yield
    finally:
        _listening.recorder = None


def is_recorded() -> bool:
    """Whether launches of this thread are reported to a recorder."""
    return getattr(_listening, "recorder", None) is not None


def _tell(found: Remembered | None, programs: int, args: tuple[Any, ...]) -> None:
    recorder = getattr(_listening, "recorder", None)
    if recorder is not None:
        recorder.launched(found, programs, args)


def forget() -> None:
    """Forget all remembered launches."""
    _remembered.clear()


def _launch_ordinarily(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    # Triton launches on the current device, which may differ from that of the tensors.
    like = _first_tensor(args)
    if not like.is_cuda or like.get_device() == torch.cuda.current_device():
        return kernel[(programs,)](*args, **constants)
    with torch.cuda.device(like.device):
        return kernel[(programs,)](*args, **constants)


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    return next(x for x in args if isinstance(x, Tensor))


class _Internals(NamedTuple):
    JITFunction: Any
    CompiledKernel: Any
    driver: Any
    knobs: Any


@cache
def internals() -> _Internals | None:
    """The parts of Triton that a remembered launch needs; None for releases or vendors that are not known."""
    oldest, newest = KNOWN_RELEASES
    if TRITON is None or not oldest <= TRITON < newest or torch.version.hip is not None:
        return None
    from triton import knobs  # type: ignore[import-untyped]
    from triton.compiler import CompiledKernel  # type: ignore[import-untyped]
    from triton.runtime import driver  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    return _Internals(JITFunction, CompiledKernel, driver, knobs)


def is_watched(knobs: Any, kernel: Any = None) -> bool:
    """Whether a profiler watches launches, or a debugger has kernels compiled in another way."""
    runtime = knobs.runtime
    seen = _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook)
    other = runtime.debug or knobs.compilation.instrumentation_mode or runtime.add_stages_inspection_hook is not None
    return bool(seen or other or (kernel is not None and (kernel.debug or kernel.pre_run_hooks)))


def _has_calls(hooks: Any) -> bool:
    return hooks is not None and (not hasattr(hooks, "calls") or bool(hooks.calls))
