"""Reads texts from the files of an option, with errors that name the option."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linattn.convert.evaluate.evaluator import Labelled
from linattn.support.documents import as_text, read_documents, read_jsonl, row_text
from linattn.support.options import OptionError


def documents(option: str, source: str) -> list[str]:
    with _named(option):
        return [as_text(document) for document in read_documents(source)]


def labelled(folder: Path) -> Labelled:
    parts: list[list[Any]] = []
    for name in ("train.jsonl", "test.jsonl"):
        path = folder / name
        if not path.is_file():
            raise OptionError("probe", f"must be a folder with train.jsonl and test.jsonl, got {folder}")
        with _named("probe"):
            rows = list(read_jsonl(path))
            if not all(isinstance(row.get("label"), int) for row in rows):
                raise OptionError("probe", f"each line of {path} must have a text and a label, an integer")
            parts += [[row_text(path, row) for row in rows], [row["label"] for row in rows]]
    return Labelled(*parts)


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Turn errors about a file into errors of the option that names it."""
    try:
        yield
    except OptionError as error:
        raise OptionError(option, error.message) from error
    except ValueError as error:
        raise OptionError(option, str(error)) from error
