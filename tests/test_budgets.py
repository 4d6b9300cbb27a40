"""Folders keep to the line budgets of DESIGN.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PART = (ROOT / "DESIGN.md").read_text().split("### Line budgets")[1].split("\n#")[0]
BUDGETS = {name: int(lines) for name, lines in re.findall(r"`([a-z]+)` \| (\d+)", PART)}


def test_every_folder_has_a_budget():
    assert BUDGETS.keys() == {path.parent.name for path in (ROOT / "src/linattn").glob("*/__init__.py")} | {"tests"}


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_to_its_budget(folder):
    place = ROOT / "tests" if folder == "tests" else ROOT / "src/linattn" / folder
    lines = sum(path.read_text().count("\n") for path in place.rglob("*.py"))
    assert lines <= BUDGETS[folder], f"{folder} has {lines} lines: shorten it, or raise its budget with a reason"
