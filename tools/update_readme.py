"""Rewrite the generated parts of the README and of pages: ``python tools/update_readme.py``; ``--check`` only compares.

A part lies between ``<!-- name:begin -->`` and ``<!-- name:end -->``. The mechanisms come from the registry, the
measurements from ``results/<device>/*.json``.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from linattn.mechanisms.registry import markdown_table

sys.path.insert(0, str(Path(__file__).parent))  # tests load this file by its path
from readme_attention import attention_text, memory_text
from readme_comparison import comparison_text
from readme_kernels import kernels_text, selection_text
from readme_models import backbones_text, models_text
from readme_sequences import decoding_text, throughput_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
NO_RESULTS = "No results of `{}` are recorded yet.\n"
Part = tuple[str, Callable[[Path], str], str]  # files of results, what makes text of one, and the command

PARTS: dict[str, dict[str, Part]] = {
    "README.md": {
        "comparison": ("compare-fashion-mnist.json", comparison_text, "linattn compare"),
        "speed": ("kernels.json", selection_text, "linattn kernels"),
    },
    "docs/speed.md": {
        "kernels": ("kernels.json", kernels_text, "linattn kernels"),
        "models": ("models.json", models_text, "linattn models"),
        "memory": ("block-memory.json", memory_text, "linattn memory"),
        "attention": ("attention-*.json", attention_text, "linattn bench"),
    },
    "docs/backbones.md": {
        "training": ("backbones-*.json", comparison_text, "linattn compare"),
        "speed": ("backbones.json", backbones_text, "linattn models --only presets"),
    },
    "docs/sequences.md": {
        "mqar": ("compare-mqar.json", comparison_text, "linattn compare --task mqar-mix"),
        "enwik8": ("compare-enwik8.json", comparison_text, "linattn compare --task text"),
        "listops": ("compare-listops.json", comparison_text, "linattn compare --task listops"),
        "imdb": ("compare-imdb.json", comparison_text, "linattn compare --task lra-text"),
        "decoding": ("decoding.json", decoding_text, "linattn decoding"),
        "throughput": ("throughput.json", throughput_text, "linattn throughput"),
    },
}


def fill(text: str, parts: dict[str, str]) -> str:
    """``text`` with every part renewed; a missing or doubled marker is an error."""
    for name, content in parts.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"the page must have the part {name!r} once, between {begin.strip()} and {end}")
        head, rest = text.split(begin)
        text = head + begin + content + end + rest.split(end)[1]
    return text


def parts_of(page: str, results: Path = RESULTS) -> dict[str, str]:
    """The generated parts of a page: one text per result file, in the order of their names."""
    made = {"mechanisms": markdown_table()} if page == "README.md" else {}
    for name, (pattern, text_of, command) in PARTS[page].items():
        texts = [text_of(path) for path in sorted(results.glob(f"*/{pattern}"))]
        made[name] = "\n".join(texts) or NO_RESULTS.format(command)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of the README and of pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is stale")
    check = parser.parse_args().check
    stale = []
    for page in PARTS:
        old = (ROOT / page).read_text()
        new = fill(old, parts_of(page))
        stale += [page] if old != new else []
        if not check:
            (ROOT / page).write_text(new)
    if check:
        print(f"stale: {', '.join(stale)}; run `make readme`" if stale else "the README and pages are up to date")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
