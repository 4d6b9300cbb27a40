"""The log of a run: one line of JSON an epoch."""

from dataclasses import asdict
from json import dumps, loads
from pathlib import Path

from linattn.support.files import write_atomically
from linattn.train.records import EpochRecord


def write_log(path: Path, epochs: list[EpochRecord]) -> None:
    """Write all lines anew. An appended log could end in half a line, or hold an epoch that is then trained again."""
    text = "".join(dumps(asdict(record), allow_nan=False) + "\n" for record in epochs)
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_log(path: Path) -> list[EpochRecord]:
    return [EpochRecord(**loads(line)) for line in path.read_text().splitlines()]
