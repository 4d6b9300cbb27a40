"""Results that are made once: a JSON file a case, named by the hash of what it depends on. Resuming is finding it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.support.config import as_json, digest
from linattn.support.files import write_atomically

Case = Mapping[str, Any]
"""What one result depends on, with every default written out: values of JSON."""


def kept(folder: Path, case: Case, fn: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The result of ``case`` from its file in ``folder``; where there is none, that of ``fn()``, which is then saved.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     first = kept(Path(folder), {"tokens": 16}, lambda: {"ms": 2.5})
        ...     again = kept(Path(folder), {"tokens": 16}, lambda: {"ms": 7.5})
        >>> again
        {'ms': 2.5}
    """
    found = find(folder, case)
    if found is not None:
        return found
    content = {"case": as_json(case), "revisions": revisions(case), "result": as_json(fn())}
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(case_path(folder, case).with_suffix(".json"), lambda temporary: temporary.write_text(text))
    result: dict[str, Any] = json.loads(text)["result"]
    return result


def find(folder: Path, case: Case) -> dict[str, Any] | None:
    """The result of ``case`` if its file is there."""
    path = case_path(folder, case).with_suffix(".json")
    result: dict[str, Any] | None = json.loads(path.read_text())["result"] if path.exists() else None
    return result


def case_path(folder: Path, case: Case) -> Path:
    """The path of a case without a suffix: its file has ``.json``, and its folder for checkpoints none."""
    return folder / digest({"case": case, "revisions": revisions(case)})


def revisions(value: Any) -> dict[str, int]:
    """The revision of each mechanism that a case names: results made before its results changed are not taken up."""
    if isinstance(value, Mapping):
        return {name: number for part in value.values() for name, number in revisions(part).items()}
    if isinstance(value, list | tuple):
        return {name: number for part in value for name, number in revisions(part).items()}
    return {value: mechanism_info(value).revision} if isinstance(value, str) and value in list_mechanisms() else {}
