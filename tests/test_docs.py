"""The documentation builds without a warning, and its code runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from linattn.lab.cli.main import app

ROOT = Path(__file__).parents[1]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)


def run(*command: str, cwd: Path) -> str:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path), cwd=ROOT)
    mechanisms = (tmp_path / "mechanisms.html").read_text()
    assert "elu(x) + 1" in mechanisms
    assert "<!-- mechanisms -->" not in mechanisms
    assert "decay_index" in (tmp_path / "algebra.html").read_text()
    fetched = [
        url
        for page in tmp_path.glob("*.html")
        for url in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?(https?:[^"\s>]+)', page.read_text())
    ]
    assert not fetched, f"pages must not load anything from elsewhere: {fetched}"


def run_page(name: str) -> dict:
    """Run the examples of a page one after the other, and return what they have made."""
    names: dict = {}
    for number, block in enumerate(PYTHON_BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text())):
        exec(compile(block, f"docs/{name}.md, example {number + 1}", "exec"), names)
    return names


def test_first_page_runs():
    names = run_page("index")
    assert names["report"].counts["causality"] > 0


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
    assert names["plain"].config._attn_implementation == "linattn_elu"


def test_the_page_on_language_models_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names = run_page("language")
    assert names["same"], "a padded row is written as if it were alone"
    plain = names["model"].eval()
    assert names["continued"].shape == (1, 18)
    ids = names["whole"]
    torch.testing.assert_close(names["again"].eval()(ids).logits, plain(ids).logits)


def documented_commands():
    """``linattn ...`` of every shell block, by page."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in SHELL_BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["linattn"]:
                    yield f"{page.name}: {line}", words[1:]


def test_documented_commands_have_the_options_they_are_written_with():
    seen = 0
    for where, words in documented_commands():
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            meant = "text" if "--task" in words else getattr(command, "default", "")  # as `compare` has it
            named = words[0] if words and words[0] in command.commands else meant
            assert named in command.commands, where
            words = words[1:] if words[:1] == [named] else words
            command = command.commands[named]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, f"{where}: {sorted(given - known)}"
        seen += 1
    assert seen > 10


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
