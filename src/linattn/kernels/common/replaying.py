"""Operators that replay what they did for inputs of the same layout: the same allocations, the same launches.

What an operator of kernels does on the host - choose tiles, count programs, line up eighty arguments - depends on the
layout of its inputs in memory and not on their numbers, and takes longer than short kernels run. The second call with
inputs of certain shapes, strides, dtypes and alignments is recorded as a script: which memory was allocated, and which
compiled kernels were launched on which tensors. Later calls follow the script. A call that did anything else (a copy,
a sum, reading a number) has no script and always runs as it is written.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from linattn.kernels.common import launching
from linattn.kernels.common.launching import ALIGNMENT, PLAIN, Remembered
from linattn.kernels.common.scripts import Allocation, Launch, Looks, Script, follow, written

# How many scripts of one operator, and calls without one, are kept: beyond that all are forgotten.
MOST = 1024
# Operators that allocate memory, and functions of their arguments that give the number it is filled with.
ALLOCATIONS: dict[str, Callable[[tuple[Any, ...]], int | float | None]] = {
    "aten::empty": lambda args: None, "aten::new_empty": lambda args: None, "aten::empty_like": lambda args: None,
    "aten::empty_strided": lambda args: None, "aten::new_empty_strided": lambda args: None,
    "aten::zeros": lambda args: 0, "aten::new_zeros": lambda args: 0, "aten::new_full": lambda args: args[2],
}  # fmt: skip


# Kept by the layout of the inputs: the script, or why there is none. Recording takes as long as a few calls, which is
# not worth it for inputs that come once, for example with changing lengths.
SEEN_ONCE, IMPOSSIBLE = "seen once", "does more than to allocate and to launch"
Scripts = dict[tuple[Any, ...], Script | str]
_all_scripts: list[Scripts] = []


def replayed(function: Callable[..., Any], unless: Callable[[], bool] = lambda: False) -> Callable[..., Any]:
    """A function that replays ``function``, which allocates and launches. unless: whether to run it as written now."""
    scripts: Scripts = {}
    _all_scripts.append(scripts)

    @wraps(function)
    def run(*arguments: Any) -> Any:
        tensors = [x for x in arguments if type(x) in PLAIN]
        triton = launching.internals()
        # Without a GPU there is no driver to call. Tensors of a subclass are not among ``tensors``.
        if triton is None or not tensors or not is_on_gpu(tensors[0]) or unless():
            return function(*arguments)
        driver = triton.driver.active
        device = driver.get_current_device()
        if tensors[0].get_device() != device or launching.is_watched(triton.knobs) or launching.is_recorded():
            return function(*arguments)
        key = looks(arguments)
        script = scripts.get(key)
        if isinstance(script, Script):
            return follow(script, tensors, driver)
        if script == IMPOSSIBLE or is_in_torch_dispatch_mode() or not are_plain(arguments, device):
            return function(*arguments)
        if script is None:
            if len(scripts) >= MOST:
                scripts.clear()
            scripts[key] = SEEN_ONCE
            return function(*arguments)
        recorder = Recorder(tensors)
        with launching.listener(recorder), recorder:
            found = function(*arguments)
        scripts[key] = recorder.script(found) or IMPOSSIBLE
        return found

    return run


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def are_plain(arguments: tuple[Any, ...], device: int) -> bool:
    """Whether a script can be recorded: tensors on the current device, none given twice, none of a subclass."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    own = len({id(x) for x in tensors}) == len(tensors)
    return own and all(type(x) in PLAIN and x.get_device() == device for x in tensors)


def is_dense(x: Tensor) -> bool:
    """Whether the numbers of x lie without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((n, size) for n, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def forget() -> None:
    """Forget all scripts."""
    for scripts in _all_scripts:
        scripts.clear()


def looks(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a script depends on: all about the arguments except the numbers in tensors and where these lie."""
    return tuple(
        (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT, x.get_device()) if type(x) in PLAIN else (type(x), x)
        for x in arguments
    )


class Recorder(TorchDispatchMode):
    """Records what a call does, as long as it only allocates memory, takes views of it and launches kernels."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        # They are kept until the script is complete: released memory could be allocated a second time.
        self.allocated: list[Tensor] = []
        self.steps: list[Allocation | Launch] = []
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ALLOCATIONS:
            # PyTorch allocates all memory at a multiple of it; otherwise other compiled kernels would be needed.
            aligned = found.data_ptr() % ALIGNMENT == 0
            fill = ALLOCATIONS[name](args)
            dense = found.is_contiguous() or (is_dense(found) and fill is None)
            self.complete &= aligned and dense and found.device == self.inputs[0].device
            self.allocated.append(found)
            self.steps.append(Allocation(found.shape, found.stride(), found.dtype, fill))
        elif not func.is_view:
            self.complete = False
        return found

    def launched(self, known: Remembered | None, programs: int, args: tuple[Any, ...]) -> None:
        pointers, values = [], list(args)
        for place, x in enumerate(args):
            if isinstance(x, Tensor):
                values[place] = 0  # the address of an empty tensor
                found = self._number(x)
                if found is None:
                    self.complete = False
                elif x.numel():
                    pointers.append((launching.FIRST + place, *found))
        if known is None:
            self.complete = False
        else:
            self.steps.append(Launch(*launching.prepared(known, programs, values), tuple(pointers)))

    def _number(self, x: Tensor) -> tuple[int, int] | None:
        """The number of the input that x is, or of the one tensor in whose memory it lies, and its offset there.

        None if several inputs share that memory: in the next call they may not, or may lie elsewhere in it.
        """
        for n, one in enumerate(self.inputs):
            if x is one:
                return n, 0
        memory = x.untyped_storage()._cdata
        tensors = enumerate((*self.inputs, *self.allocated))
        around = [(n, one) for n, one in tensors if one.untyped_storage()._cdata == memory]
        return (around[0][0], x.data_ptr() - around[0][1].data_ptr()) if len(around) == 1 else None

    def script(self, found: Any) -> Script | None:
        """The recorded script; None if it is not complete. Every output must be a whole allocation of its own."""
        outputs: dict[int, Looks] = {}
        for x in found if isinstance(found, tuple) else (found,):
            number, _ = self._number(x) or (0, 0)
            made = self.allocated[number - len(self.inputs)] if number >= len(self.inputs) else None
            whole = made is not None and is_dense(x) and (x.numel(), x.dtype) == (made.numel(), made.dtype)
            if not whole or number in outputs:
                return None
            outputs[number] = x.shape, x.stride()
        if not self.complete:
            return None
        return written(tuple(self.steps), len(self.inputs), outputs, not isinstance(found, tuple))
