"""Texts that are named by files, with errors that name the option."""

from pathlib import Path
from typing import Any

from linattn.linearize.evaluate.evaluator import Labelled
from linattn.support.options import OptionError
from linattn.tasks.text.documents import as_text, read_documents, read_jsonl, row_text


def documents(option: str, source: str) -> list[str]:
    try:
        return [as_text(document) for document in read_documents(source)]
    except OptionError as error:
        raise OptionError(option, error.message) from error


def labelled(folder: Path) -> Labelled:
    parts: list[list[Any]] = []
    for name in ("train.jsonl", "test.jsonl"):
        path = folder / name
        if not path.is_file():
            raise OptionError("probe", f"must be a folder with train.jsonl and test.jsonl, got {folder}")
        try:
            rows = list(read_jsonl(path))
            texts = [row_text(path, row) for row in rows]
        except OptionError as error:
            raise OptionError("probe", error.message) from error
        if not all(isinstance(row.get("label"), int) for row in rows):
            raise OptionError("probe", f"each line of {path} must have a text and a label, an integer")
        parts += [texts, [row["label"] for row in rows]]
    return Labelled(*parts)
