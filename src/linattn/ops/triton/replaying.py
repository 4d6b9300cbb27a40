"""Operators that do again what they did for inputs that look alike: the same memory, the same launches.

What an operator of kernels does on the host - choose tiles, count programs, line up eighty arguments - depends on how
its inputs lie in memory and not on the numbers there, and takes longer than short kernels run. The second call with
inputs of certain shapes, strides, dtypes and alignments is written down as a script: which memory was asked for, and
which compiled kernels were launched on what. Later calls follow the script. A call that did anything else on the way
(a copy, a sum, a number read) has no script and always runs as it is written.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from linattn.ops.triton import launching
from linattn.ops.triton.launching import ALIGNMENT, PLAIN, Remembered
from linattn.ops.triton.scripts import Allocation, Launch, Looks, Script, follow, written

# Scripts of one operator, and calls that have none: past that all are forgotten.
MOST = 1024
# Operators that hand out memory, and what it is filled with, by their arguments.
ALLOCATIONS: dict[str, Callable[[tuple[Any, ...]], int | float | None]] = {
    "aten::empty": lambda args: None, "aten::new_empty": lambda args: None, "aten::empty_like": lambda args: None,
    "aten::empty_strided": lambda args: None, "aten::new_empty_strided": lambda args: None,
    "aten::zeros": lambda args: 0, "aten::new_zeros": lambda args: 0, "aten::new_full": lambda args: args[2],
}  # fmt: skip


# By the looks of the inputs: the script, or why there is none. To write one takes as long as a few calls, which inputs
# that come once, as of lengths that change, are not worth.
SEEN_ONCE, IMPOSSIBLE = "seen once", "does more than to allocate and to launch"
Scripts = dict[tuple[Any, ...], Script | str]
_all_scripts: list[Scripts] = []


def replayed(function: Callable[..., Any], unless: Callable[[], bool] = lambda: False) -> Callable[..., Any]:
    """The function, which allocates and launches, by its scripts. unless: whether calls are to run as they are now."""
    scripts: Scripts = {}
    _all_scripts.append(scripts)

    @wraps(function)
    def run(*arguments: Any) -> Any:
        tensors = [x for x in arguments if type(x) in PLAIN]
        triton = launching.internals()
        # Without a GPU there is no driver to ask. Tensors of a subclass are none of those.
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
    """Whether a script can be written: tensors on the current device, each an input of its own, none of a subclass."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    own = len({id(x) for x in tensors}) == len(tensors)
    return own and all(type(x) in PLAIN and x.get_device() == device for x in tensors)


def is_dense(x: Tensor) -> bool:
    """Whether its numbers lie without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((n, size) for n, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def forget() -> None:
    """All scripts."""
    for scripts in _all_scripts:
        scripts.clear()


def looks(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of the arguments a script depends on: all but the numbers in the tensors and where these lie."""
    return tuple(
        (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT, x.get_device()) if type(x) in PLAIN else (type(x), x)
        for x in arguments
    )


class Recorder(TorchDispatchMode):
    """Writes down what a call does, as long as that is only to ask for memory, to look at it and to launch kernels."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        # They are kept until the script is written: memory that was let go could be handed out a second time.
        self.allocated: list[Tensor] = []
        self.steps: list[Allocation | Launch] = []
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ALLOCATIONS:
            # All memory that PyTorch hands out begins at a multiple of it; if not, kernels would be others.
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
                values[place] = 0  # where an empty one lies
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
        """Of the input that it is, or of the one tensor in whose memory it lies.

        None where inputs share that memory: in the next call they may not, or lie elsewhere in it.
        """
        for n, one in enumerate(self.inputs):
            if x is one:
                return n, 0
        memory = x.untyped_storage()._cdata
        tensors = enumerate((*self.inputs, *self.allocated))
        around = [(n, one) for n, one in tensors if one.untyped_storage()._cdata == memory]
        return (around[0][0], x.data_ptr() - around[0][1].data_ptr()) if len(around) == 1 else None

    def script(self, found: Any) -> Script | None:
        """What was written down; None if that is not all. Of the outputs each must be a whole allocation of its own."""
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
