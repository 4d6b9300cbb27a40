"""What the files of a task hold, in a few letters: a run that goes on must read what it began with."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

# In a folder: of texts, labelled examples and tokenizers. Others, such as the weights beside a tokenizer, do not count.
ENDINGS = (".txt", ".jsonl", ".gz", ".npz", ".json", ".model", ".tiktoken")
PIECE = 1 << 24


def content_digest(places: Iterable[str | Path]) -> str:
    """Digest of files, or of the files in folders, by their names and all that they hold."""
    found = hashlib.blake2b(digest_size=12)
    for place in places:
        path = Path(place).expanduser()
        files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.suffix in ENDINGS)
        for file in files:
            inside = b"" if file == path else file.name.encode()  # a file alone may be renamed
            found.update(b"\0".join([inside, str(file.stat().st_size).encode(), b""]))
            with file.open("rb") as opened:
                while piece := opened.read(PIECE):
                    found.update(piece)
    return found.hexdigest()
