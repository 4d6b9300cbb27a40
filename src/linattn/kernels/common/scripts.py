"""Scripts of what an operator of kernels does: which memory it allocates, and which kernels it launches on it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.common import launching

# Bytes. Memory that only the call itself needs shares one piece, at multiples of PIECE, if it is no larger than
# LARGEST. An allocation takes half as long as a launch; a large piece may be free only in parts.
PIECE, LARGEST = 512, 1 << 24


class Allocation(NamedTuple):
    """Memory that the call allocated, without gaps; fill: the number it is filled with, if any."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    fill: int | float | None

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // PIECE) * PIECE


class Launch(NamedTuple):
    """Launch of a compiled kernel, with all that the driver is given (see ``launching.prepared``).

    pointers: the place of each address in it, the number of the tensor, and the offset from its start in bytes.
    """

    run: Callable[..., None]
    given: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]


Steps = tuple[Allocation | Launch, ...]
Looks = tuple[torch.Size, tuple[int, ...]]


class Script(NamedTuple):
    """A script, in which tensors are numbered: the inputs in their order, then the allocations.

    places: offsets in bytes of the allocations that share memory; room: size of that memory. last_uses: the steps
    after which other allocations that are not returned are released. outputs: the allocations that are returned, with
    their shapes and strides.
    """

    steps: Steps
    places: dict[int, int]
    room: int
    last_uses: dict[int, tuple[int, ...]]
    outputs: tuple[tuple[int, Looks], ...]
    single: bool


def written(steps: Steps, inputs: int, outputs: dict[int, Looks], single: bool) -> Script:
    """The script of ``steps`` on ``inputs`` many inputs."""
    lives: dict[int, tuple[int, int]] = {}  # first and last steps of allocations that are not returned
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
    """Places of allocations so that none overlaps another that is in use: largest first, as low as it fits."""
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
    """Follow the steps of the script for other inputs with the same layout."""
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
