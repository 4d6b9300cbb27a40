"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in its place in one step.

    Whatever happens on the way, ``path`` holds the old content or the new, and no temporary file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Same folder, so that the replacement never crosses file systems; same suffix, as chart writers go by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON; NaN is no JSON, readers in other languages would choke on it: it becomes text."""
    text = dumps(_without_nan(value), indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
