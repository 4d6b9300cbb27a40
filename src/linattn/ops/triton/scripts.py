"""What an operator of kernels does, written down: which memory it asks for, and which kernels it launches there."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.triton import launching

# Bytes: what a call needs for itself alone shares one piece of memory, at multiples of the one, if it is no larger than
# the other. To ask for memory takes half as long as a launch; a large piece may be there only in parts.
PIECE, LARGEST = 512, 1 << 24


class Allocation(NamedTuple):
    """Memory that the call asked for, without gaps; fill: with what, if with anything."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    fill: int | float | None

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // PIECE) * PIECE


class Launch(NamedTuple):
    """Of a compiled kernel, with all that the driver is given (see ``launching.prepared``).

    pointers: place among it, number of the tensor, bytes behind its start.
    """

    run: Callable[..., None]
    given: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]


Steps = tuple[Allocation | Launch, ...]
Looks = tuple[torch.Size, tuple[int, ...]]


class Script(NamedTuple):
    """Tensors are numbered: those of the inputs in their order, then the allocations.

    places: of the allocations that share memory, bytes behind its start; room: how much that is. last_uses: of the
    others that are not returned, the steps after which they are let go. outputs: allocations, and the shapes and
    strides that they are returned in.
    """

    steps: Steps
    places: dict[int, int]
    room: int
    last_uses: dict[int, tuple[int, ...]]
    outputs: tuple[tuple[int, Looks], ...]
    single: bool


def written(steps: Steps, inputs: int, outputs: dict[int, Looks], single: bool) -> Script:
    """The script of steps on so many inputs."""
    lives: dict[int, tuple[int, int]] = {}  # of allocations that are not returned, from step to step
    made: dict[int, Allocation] = {}
    for n, step in enumerate(steps):
        if isinstance(step, Allocation):
            number = inputs + len(made)
            made[number] = step
            if number not in outputs:
                lives[number] = n, n
        else:
            lives.update((number, (lives[number][0], n)) for _, number, _ in step.pointers if number in lives)
    shared = {number: made[number].bytes for number in lives if made[number].fill is None}
    shared = {number: size for number, size in shared.items() if size <= LARGEST}
    places = packed(shared, lives)
    last_uses: dict[int, tuple[int, ...]] = {}
    for number in lives.keys() - shared.keys():
        end = lives[number][1]
        last_uses[end] = (*last_uses.get(end, ()), number)
    room = max((at + shared[number] for number, at in places.items()), default=0)
    return Script(steps, places, room, last_uses, tuple(outputs.items()), single)


def packed(sizes: dict[int, int], lives: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Places where none lies in memory that another one uses at the same time: largest first, as low as they fit."""
    places: dict[int, int] = {}
    for number in sorted(sizes, key=lambda number: -sizes[number]):
        begin, end = lives[number]
        others = [other for other in places if lives[other][0] <= end and begin <= lives[other][1]]
        at = 0
        for low, high in sorted((places[other], places[other] + sizes[other]) for other in others):
            if at + sizes[number] <= low:
                break
            at = max(at, high)
        places[number] = at
    return places


def follow(script: Script, inputs: list[Tensor], driver: Any) -> Any:
    """The steps of the script on other inputs that look the same."""
    steps, places, room, last_uses, outputs, single = script
    tensors: list[Any] = list(inputs)
    addresses = [x.data_ptr() for x in inputs]
    device = inputs[0].device
    stream = driver.get_current_stream(driver.get_current_device())
    shared = torch.empty(room, dtype=torch.uint8, device=device) if room else None
    start = 0 if shared is None else shared.data_ptr()
    for n, step in enumerate(steps):
        if isinstance(step, Launch):
            run, given, pointers = step
            values = list(given)
            values[launching.STREAM] = stream
            for place, number, offset in pointers:
                values[place] = addresses[number] + offset
            run(*values)
        elif len(addresses) in places:
            addresses.append(start + places[len(addresses)])
            tensors.append(None)
        else:
            shape, strides, dtype, fill = step
            if fill is None:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            else:
                made = torch.full(shape, fill, dtype=dtype, device=device)
            tensors.append(made)
            addresses.append(made.data_ptr())
        if last_uses:
            for number in last_uses.get(n, ()):
                tensors[number] = None
    found = [
        x if (x.shape, x.stride()) == looks else x.as_strided(*looks)
        for x, looks in ((tensors[number], looks) for number, looks in outputs)
    ]
    return found[0] if single else tuple(found)
