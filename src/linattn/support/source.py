"""Identifies the version of the code."""

from hashlib import sha256
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def source_digest(folder: Path = PACKAGE) -> str:
    """Digest of all Python files in the folder, as the code also changes between releases with the same version."""
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
