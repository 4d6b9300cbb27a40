"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it into place in one step.

    Whatever happens meanwhile, ``path`` has either the old or the new content, and no temporary file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the move never crosses file systems; with the same suffix, which chart writers read.
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


def remove_halves(folder: Path) -> None:
    """Remove what :func:`write_atomically` left half written in ``folder`` when its process was killed."""
    for half in folder.glob(".*-????????.*") if folder.is_dir() else ():
        half.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, with NaN as text: readers in other languages refuse NaN, which is not valid JSON."""
    text = dumps(_without_nan(value), indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
