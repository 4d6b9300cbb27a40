"""Imports between the folders of ``linattn.linearize`` point one way: each knows those before it alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import linattn

SOURCE = Path(linattn.__file__).parent / "linearize"
ORDER = (
    "hf", "plan", "adapters", "layer", "convert", "timm_files", "files", "training", "transfer", "finetune", "recipes",
    "degrees", "evaluate", "report", "inspect", "arguments", "run", "jobs",
)  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    """Folders and modules of ``linattn.linearize`` that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            if parts[:2] == ["linattn", "linearize"] and len(parts) > 2:
                yield parts[2]


def test_every_folder_has_a_place() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_arrows(name: str) -> None:
    files = [SOURCE / f"{name}.py"] if (SOURCE / f"{name}.py").is_file() else sorted((SOURCE / name).rglob("*.py"))
    later = set(ORDER[ORDER.index(name) + 1 :])
    assert files
    wrong = {f"{path.name} imports {each}" for path in files for each in imports(path) if each in later}
    assert not wrong
