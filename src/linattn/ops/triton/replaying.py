"""Operators that do again what they did for inputs that look alike: the same memory, the same launches.

What an operator of kernels does on the host - choose tiles, count programs, line up eighty arguments - depends on how
its inputs lie in memory and not on the numbers there, and takes longer than short kernels run. The second call with
inputs of certain shapes, strides, dtypes and alignments is written down as a script: which memory was asked for, and
which compiled kernels were launched on what. Later calls follow the script. A call that did anything else on the way
(a copy, a sum, a number read) has no script and always runs as it is written.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from linattn.ops.triton import launching
from linattn.ops.triton.launching import ALIGNMENT, PLAIN, Remembered

# Scripts of one operator, and calls that have none: past that all are forgotten.
MOST = 1024
# Operators that hand out memory, and whether as zeros.
ALLOCATIONS = {
    "aten::empty": False, "aten::new_empty": False, "aten::empty_like": False,
    "aten::zeros": True, "aten::new_zeros": True,
}  # fmt: skip


class Allocation(NamedTuple):
    """Contiguous memory that the call asked for."""

    shape: torch.Size
    dtype: torch.dtype
    zeros: bool


class Launch(NamedTuple):
    """Of a compiled kernel; pointers: place among the arguments, number of the tensor, bytes behind its start."""

    known: Remembered
    programs: int
    values: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]


class Script(NamedTuple):
    """Tensors are numbered: those of the inputs in their order, then the allocations.

    last_uses: of the tensors that are not returned, the steps after which they are let go. outputs: allocations and
    the shapes that they are returned in.
    """

    steps: tuple[Allocation | Launch, ...]
    last_uses: dict[int, tuple[int, ...]]
    outputs: tuple[tuple[int, torch.Size], ...]
    single: bool


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
            self.complete &= aligned and found.is_contiguous() and found.device == self.inputs[0].device
            self.allocated.append(found)
            self.steps.append(Allocation(found.shape, found.dtype, ALLOCATIONS[name]))
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
                    pointers.append((place, *found))
        if known is None:
            self.complete = False
        else:
            self.steps.append(Launch(known, programs, tuple(values), tuple(pointers)))

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
        outputs: dict[int, torch.Size] = {}
        for x in found if isinstance(found, tuple) else (found,):
            number, _ = self._number(x) or (0, 0)
            made = self.allocated[number - len(self.inputs)] if number >= len(self.inputs) else None
            whole = made is not None and x.is_contiguous() and (x.numel(), x.dtype) == (made.numel(), made.dtype)
            if not whole or number in outputs:
                return None
            outputs[number] = x.shape
        if not self.complete:
            return None
        used: dict[int, int] = {}  # the last step that needs an allocation
        count = len(self.inputs)
        for n, step in enumerate(self.steps):
            if isinstance(step, Allocation):
                used[count] = n
                count += 1
            else:
                used.update((number, n) for _, number, _ in step.pointers if number >= len(self.inputs))
        last_uses: dict[int, tuple[int, ...]] = {}
        for number, n in used.items():
            if number not in outputs:
                last_uses[n] = (*last_uses.get(n, ()), number)
        return Script(tuple(self.steps), last_uses, tuple(outputs.items()), not isinstance(found, tuple))


def follow(script: Script, inputs: list[Tensor], driver: Any) -> Any:
    """The steps of the script on other inputs that look the same."""
    tensors: list[Any] = list(inputs)
    addresses = [x.data_ptr() for x in inputs]
    device = inputs[0].device
    stream = driver.get_current_stream(driver.get_current_device())
    for n, step in enumerate(script.steps):
        if type(step) is Allocation:
            made = (torch.zeros if step.zeros else torch.empty)(step.shape, dtype=step.dtype, device=device)
            tensors.append(made)
            addresses.append(made.data_ptr())
        else:
            known, programs, values, pointers = step  # type: ignore[misc]
            given = list(values)
            for place, number, offset in pointers:
                given[place] = addresses[number] + offset
            launching.run(known, programs, given, stream)
        for number in script.last_uses.get(n, ()):
            tensors[number] = None
    found = [tensors[number] for number, _ in script.outputs]
    found = [x if x.shape == shape else x.view(shape) for x, (_, shape) in zip(found, script.outputs, strict=True)]
    return found[0] if script.single else tuple(found)
