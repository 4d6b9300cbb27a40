"""Sets of drawn sequences, drawn in independent blocks, and kept in a folder if one is given."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from os import cpu_count
from pathlib import Path

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import Sequences, join
from linattn.support.files import write_atomically
from linattn.support.options import SettingError

BLOCK = 256  # sequences drawn at once, which bounds memory whatever the size of the set
PART = 16  # blocks in one file: the most that is lost if drawing is interrupted

OnCount = Callable[[int], None]


def draw_set(
    draw: Callable[[int, int], Sequences], total: int, on_count: OnCount, folder: Path | None = None
) -> Sequences:
    """Draw ``total`` sequences by ``draw(first, count)``, at most BLOCK at a time, as small integer types.

    Blocks are independent and drawn in threads, as most of the work is done by torch, which lets other threads run.
    ``on_count`` is called with the number of sequences so far. ``folder`` keeps sets for later calls. A set is found by
    the content of its first block, which is always drawn: another version of a task or of torch may draw another one.
    """

    def block(first: int) -> Sequences:
        return narrowed(draw(first, min(BLOCK, total - first)))

    if folder is not None:
        folder = folder / _digest(block(0))
    parts, size = [], BLOCK * PART
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        for first in range(0, total, size):
            count = min(size, total - first)
            path = None if folder is None else folder / f"{first}-{count}.pt"
            if path is not None and path.exists():
                found = _load(path)
                on_count(first + count)
            else:
                found = join(_counted(pool.map(block, range(first, first + count, BLOCK)), first, on_count))
                if path is not None:
                    _save(found, path)
            parts.append(found)
    return join(parts)


def narrowed(batch: Sequences) -> Sequences:
    """The batch with ids in a small type that holds them and ``IGNORED``: a quarter of the space for a kept set."""
    kind = torch.int16 if max(int(batch.inputs.max()), int(batch.targets.max())) < 2**15 else torch.int32
    return replace(batch, inputs=batch.inputs.to(kind), targets=batch.targets.to(kind))


def widened(batch: Sequences) -> Sequences:
    return replace(batch, inputs=batch.inputs.long(), targets=batch.targets.long())


def _counted(blocks: Iterable[Sequences], done: int, on_count: OnCount) -> Iterator[Sequences]:
    for block in blocks:
        done += len(block)
        on_count(done)
        yield block


def _tensors(found: Sequences) -> dict[str, Tensor]:
    """The tensors of a batch that are not None, by name."""
    tensors = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: value for name, value in tensors.items() if value is not None}


def _digest(found: Sequences) -> str:
    content = b"".join(value.contiguous().numpy().tobytes() for value in _tensors(found).values())
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _save(found: Sequences, path: Path) -> None:
    write_atomically(path, lambda temporary: torch.save(_tensors(found), temporary))


def _load(path: Path) -> Sequences:
    try:
        return Sequences(**torch.load(path, weights_only=True))
    except Exception as error:  # a truncated file fails in many ways
        raise SettingError("cache", f"{path} cannot be read ({error}): delete it") from error
