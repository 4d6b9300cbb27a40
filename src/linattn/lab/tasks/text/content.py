"""Digests of the files of a task: a run that is resumed must read the same content as before."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Endings of texts, labelled examples and tokenizers. Other files of a folder, such as model weights, do not count.
ENDINGS = (".txt", ".jsonl", ".gz", ".npz", ".json", ".model", ".tiktoken")
PIECE = 1 << 24


def content_digest(places: Iterable[str | Path]) -> str:
    """Digest of files, or of the files in folders, by their names and their whole content."""
    found = hashlib.blake2b(digest_size=12)
    for place in places:
        path = Path(place).expanduser()
        in_folder = (file for file in path.glob("*") if file.suffix in ENDINGS and file.is_file())
        files = [path] if path.is_file() else sorted(in_folder)
        for file in files:
            inside = b"" if file == path else file.name.encode()  # a file given by itself may be renamed
            found.update(b"\0".join([inside, str(file.stat().st_size).encode(), b""]))
            with file.open("rb") as opened:
                while piece := opened.read(PIECE):
                    found.update(piece)
    return found.hexdigest()
