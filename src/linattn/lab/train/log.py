"""The log of a run, with one line of JSON for each evaluation."""

from collections.abc import Sequence
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path
from typing import Any

from linattn.lab.train.records import EpochRecord
from linattn.support.files import write_atomically


def write_log(path: Path, records: Sequence[Any]) -> None:
    """Rewrite the whole log. An appended one could end in half a line, or have an epoch that is then trained again.

    ``records`` are dataclasses, such as :class:`EpochRecord`.
    """
    text = "".join(dumps(asdict(record), allow_nan=False) + "\n" for record in records)
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_log(path: Path) -> list[EpochRecord]:
    return [EpochRecord(**loads(line)) for line in path.read_text().splitlines()]


def logged(path: Path) -> int:
    """How many lines the log has; 0 if there is none yet."""
    return len(path.read_text().splitlines()) if path.exists() else 0
