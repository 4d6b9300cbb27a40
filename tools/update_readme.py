"""Rewrite the generated parts of the README and of pages: ``python tools/update_readme.py``; ``--check`` only compares.

A part lies between ``<!-- name:begin -->`` and ``<!-- name:end -->``. The mechanisms come from the registry, the
measurements from ``results/<device>/*.json``:

README          ``compare-*`` of `linattn compare`, those of images; a selection of ``kernels`` of `linattn kernels`
speed           all of the latter, ``models`` of `linattn models`, ``block-memory`` of `linattn memory`,
                ``attention-*`` of `linattn bench`
backbones       ``backbones-*`` of `linattn compare`, ``backbones`` of `linattn models`
sequences       ``compare-*`` of sequences, with charts that are drawn here, ``decoding``, ``throughput``
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from linattn.mechanisms.registry import markdown_table

sys.path.insert(0, str(Path(__file__).parent))  # tests load this file by its path
from readme_attention import attention_text, memory_text
from readme_comparison import comparison_text
from readme_kernels import kernels_text, selection_text
from readme_models import backbones_text, models_text
from readme_sequences import canon_text, decoding_text, draw_charts, throughput_text

ROOT = Path(__file__).parents[1]
README, BACKBONES = ROOT / "README.md", ROOT / "docs" / "backbones.md"
SEQUENCES, SPEED = ROOT / "docs" / "sequences.md", ROOT / "docs" / "speed.md"
RESULTS = ROOT / "results"
NO_RESULTS = "No results of `{}` are recorded yet.\n"
NOT_MEASURED = "Not measured yet: `{}` has not been run.\n"


def fill(text: str, parts: dict[str, str]) -> str:
    """``text`` with every part renewed; a missing or doubled marker is an error."""
    for name, content in parts.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"the page must have the part {name!r} once, between {begin.strip()} and {end}")
        head, rest = text.split(begin)
        text = head + begin + content + end + rest.split(end)[1]
    return text


def generated_parts(results: Path = RESULTS) -> dict[str, str]:
    return {
        "mechanisms": markdown_table(),
        "comparison": texts(results, "compare-*.json", images_text, "linattn compare"),
        "speed": texts(results, "kernels.json", selection_text, "linattn kernels"),
    }


def speed_parts(results: Path = RESULTS) -> dict[str, str]:
    return {
        "kernels": texts(results, "kernels.json", kernels_text, "linattn kernels"),
        "models": texts(results, "models.json", models_text, "linattn models"),
        "memory": texts(results, "block-memory.json", memory_text, "linattn memory"),
        "attention": texts(results, "attention-*.json", attention_text, "linattn bench"),
    }


def backbone_parts(results: Path = RESULTS) -> dict[str, str]:
    return {
        "training": texts(results, "backbones-*.json", comparison_text, "linattn compare"),
        "speed": texts(results, "backbones.json", backbones_text, "linattn models --cases presets"),
    }


def sequence_parts(results: Path = RESULTS) -> dict[str, str]:
    asked = {
        "mqar": ("compare-mqar.json", canon_text, "linattn compare --task mqar-mix"),
        "enwik8": ("compare-enwik8.json", canon_text, "linattn compare --task text"),
        "listops": ("compare-listops.json", comparison_text, "linattn compare --task listops"),
        "imdb": ("compare-imdb.json", comparison_text, "linattn compare --task lra-text"),
        "decoding": ("decoding.json", decoding_text, "linattn decoding"),
        "throughput": ("throughput.json", throughput_text, "linattn throughput"),
    }
    return {name: texts(results, *part, nothing=NOT_MEASURED) for name, part in asked.items()}


def texts(
    folder: Path, pattern: str, text_of: Callable[[Path], str], command: str, *, nothing: str = NO_RESULTS
) -> str:
    """One part per result file, in the order of their names; ``nothing`` is said where there is none."""
    found = [text_of(path) for path in sorted(folder.glob(f"*/{pattern}"))]
    return "\n".join(filter(None, found)) or nothing.format(command)


def images_text(path: Path) -> str:
    """Comparisons on sequences have a page of their own."""
    return "" if json.loads(path.read_text())["meta"].get("kind") == "text" else comparison_text(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of the README and of pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is stale")
    check = parser.parse_args().check
    if not check:
        draw_charts(RESULTS)
    stale = []
    for page, parts in (
        (README, generated_parts()),
        (SPEED, speed_parts()),
        (BACKBONES, backbone_parts()),
        (SEQUENCES, sequence_parts()),
    ):
        old = page.read_text()
        new = fill(old, parts)
        stale += [page.name] if old != new else []
        if not check:
            page.write_text(new)
    if check:
        print(f"stale: {', '.join(stale)}; run `make readme`" if stale else "the README and pages are up to date")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
