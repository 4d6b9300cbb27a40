"""The README and the pages say what is: tables are current, examples run, commands exist with their options."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from linattn.lab.command import command_name, flag, load
from linattn.lab.commands import COMMANDS
from linattn.support.config import option_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.S | re.M)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)
OF_ALL = {"--help", "--help-all", "--config", "--json", "--quiet"}


def load_tool():
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "tools" / "update_readme.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


tool = load_tool()


@pytest.mark.parametrize("page", tool.PARTS)
def test_generated_parts_are_current(page):
    text = (ROOT / page).read_text()
    for name, part in tool.parts_of(page).items():
        stale = f"the part {name!r} of {page} is stale: run `make readme` and commit the change"
        assert tool.fill(text, {name: part}) == text, stale


@pytest.mark.parametrize("page", tool.PARTS)
def test_what_is_not_measured_is_said(page, tmp_path):
    for name, part in tool.parts_of(page, tmp_path).items():
        assert name == "mechanisms" or "linattn" in part.splitlines()[0]
        assert "|" not in part or name == "mechanisms"


def test_the_selection_is_of_measured_cases():
    """A case that was renamed would be left out in silence."""
    path = tool.RESULTS / "h200" / "kernels.json"
    text, cases = tool.selection_text(path), {row["case"] for row in json.loads(path.read_text())["rows"]}
    shown = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert len(shown) == 12
    assert set(shown) <= cases


def test_a_stale_or_missing_part_is_caught():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert tool.fill(text, {"x": "new\n"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="'y' once"):
        tool.fill(text, {"y": "new\n"})


def test_the_example_runs():
    (example,) = PYTHON_BLOCK.findall(README)
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})


def test_make_targets_exist():
    code = [block or span for block, span in CODE.findall(README)]
    named = {name for text in code for name in re.findall(r"\bmake ([a-z-]+)", text)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test"} <= named
    assert not named - targets, f"README.md names targets that the Makefile lacks: {sorted(named - targets)}"


def test_linked_files_exist():
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert linked
    assert all((ROOT / link).exists() for link in linked)


def documented_commands():
    """``linattn ...`` of every shell block and span of code, by page."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in SHELL_BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["linattn"]:
                    yield f"{page.name}: {line}", words[1:]


def test_documented_commands_have_the_options_they_are_written_with():
    seen = 0
    for where, words in documented_commands():
        name = command_name(words)
        if name == "compare" and any(word.partition("=")[0] == "--task" for word in words):
            name = "compare text"
        assert name, where
        known = {flag(own.name) for own in fields(load(name)) if not option_of(own).hidden} | OF_ALL
        known |= {f"--no-{name.removeprefix('--')}" for name in known}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, f"{where}: {sorted(given - known)}"
        seen += 1
    assert seen > 10


def test_the_first_page_of_help_is_short():
    """No command shows more than 25 options of its own before --help-all."""
    for name in COMMANDS:
        shown = [own.name for own in fields(load(name)) if not (option_of(own).rare or option_of(own).hidden)]
        assert len(shown) <= 25, f"{name}: {len(shown)} options: {shown}"


def run(*command: str, cwd: Path) -> str:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path), cwd=ROOT)
    mechanisms = (tmp_path / "mechanisms.html").read_text()
    assert "elu(x) + 1" in mechanisms
    assert "<!-- mechanisms -->" not in mechanisms
    assert "decay_index" in (tmp_path / "algebra.html").read_text()
    outside = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="?(https?:[^"\s>]+)')
    fetched = [url for page in tmp_path.glob("*.html") for url in outside.findall(page.read_text())]
    assert not fetched, f"pages must not load anything from elsewhere: {fetched}"


def run_page(name: str) -> dict:
    """Run the examples of a page one after the other, and return what they have made."""
    names: dict = {}
    for number, block in enumerate(PYTHON_BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text())):
        exec(compile(block, f"docs/{name}.md, example {number + 1}", "exec"), names)
    return names


def test_first_page_runs():
    assert run_page("index")["report"].counts["causality"] > 0


def test_the_page_on_comparisons_runs():
    names = run_page("compare")
    assert names["heat"].shape == (4, 4)
    assert len(names["result"].epochs) == 1


def test_the_page_on_pretrained_models_runs(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names = run_page("linearize")
    assert [stage.name for stage in names["report"].stages] == ["teacher", "converted", "transfer", "finetune"]
    assert names["written"].shape == (2, 52)


def test_the_page_on_language_models_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names = run_page("language")
    assert names["same"], "a padded row is written as if it were alone"
    plain = names["model"].eval()
    assert names["continued"].shape == (1, 18)
    ids = names["whole"]
    torch.testing.assert_close(names["again"].eval()(ids).logits, plain(ids).logits)


def test_the_mechanism_of_the_guide_keeps_the_contracts(tmp_path):
    """In a process of its own: it must not stay in this one's registry."""
    (example,) = PYTHON_BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    (tmp_path / "mine.py").write_text(example)
    script = (
        "import doctest, linattn.testing, mine\n"
        "assert doctest.testmod(mine) == (0, 5)\n"
        "contracts = [name for name in linattn.testing.CONTRACTS if name != 'compile']\n"
        "print(linattn.testing.check_mechanism(mine.SquaredRelu, contracts))"
    )
    assert "squared_relu keeps" in run("-c", script, cwd=tmp_path)
