"""Names of classes, where the files of a data set do not hold them."""

from pathlib import Path

from torch import Tensor


def class_names(folder: Path, labels: Tensor) -> tuple[str, ...]:
    """The lines of ``classes.txt`` in ``folder``, label 0 first; without that file, the labels as numbers."""
    path = folder / "classes.txt"
    used = int(labels.max()) + 1
    if not path.is_file():
        return tuple(str(label) for label in range(used))
    names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(names) < used:
        raise ValueError(
            f"{path} names {len(names)} classes, but labels go up to {used - 1}: one name a line, label 0 first"
        )
    return names
