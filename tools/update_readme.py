"""Rewrite the generated parts of the README and of pages: ``python tools/update_readme.py``; ``--check`` only compares.

A part lies between ``<!-- name:begin -->`` and ``<!-- name:end -->``. The mechanisms come from the registry, the
measurements from ``results/<device>/*.json``: ``attention-*`` of `linattn bench`, ``compare-*`` of `linattn compare`,
``block-memory`` of `linattn memory`, ``kernels`` of `linattn kernels`, ``models`` of `linattn models`. The page of
backbones has ``backbones-*`` of `linattn compare` and ``backbones`` of `linattn models`; that of sequences has those
``compare-*`` that are of sequences, with charts that are drawn here, ``decoding`` and ``throughput``.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linattn.mechanisms.table import markdown_table

sys.path.insert(0, str(Path(__file__).parent))  # tests load this file by its path
from readme_comparison import comparison_text
from readme_kernels import kernels_text
from readme_models import backbones_text, models_text
from readme_sequences import canon_text, decoding_text, draw_charts, throughput_text

ROOT = Path(__file__).parents[1]
README, BACKBONES = ROOT / "README.md", ROOT / "docs" / "backbones.md"
SEQUENCES = ROOT / "docs" / "sequences.md"
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
        "memory": texts(results, "block-memory.json", memory_text, "linattn memory"),
        "kernels": texts(results, "kernels.json", kernels_text, "linattn kernels"),
        "models": texts(results, "models.json", models_text, "linattn models"),
        "results": texts(results, "attention-*.json", attention_text, "linattn bench"),
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


def memory_text(path: Path) -> str:
    """Peak memory of one block, tokens down, contenders across."""
    result = json.loads(path.read_text())
    meta, settings, rows = result["meta"], result["meta"]["settings"], result["rows"]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {(row["tokens"], row["contender"]): _memory_cell(row) for row in rows}
    lines = [
        f"**One transformer block**, forward and backward, width {settings['dim']}, {settings['heads']} heads, batch "
        f"{settings['batch']}, {settings['precision']}: peak memory and time.",
        f"{meta['device']}, torch {meta['versions']['torch']}, {meta['date'][:10]}: `{meta['command']}`.",
        "",
        "| tokens | " + " | ".join(contenders) + " |",
        "|---:|" + "---:|" * len(contenders),
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        lines.append(f"| {tokens:,} | " + " | ".join(cells.get((tokens, c), "") for c in contenders) + " |")
    chart = path.with_suffix(".png")
    if chart.exists():
        lines += ["", f"![memory against tokens]({chart.relative_to(path.parents[2]).as_posix()})"]
    return "\n".join([*lines, ""])


def _memory_cell(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return f"{_digits(row['peak_bytes'] / 2**20)} MiB, {_digits(1000 * row['seconds'])} ms"


def attention_text(path: Path) -> str:
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    settings, versions = meta["settings"], meta["versions"]
    kind = "causal" if settings["causal"] else "bidirectional"
    decay = "" if settings["decay"] == "none" else f", decay per {settings['decay']}"
    shape = f"B = {settings['batch']}, H = {settings['heads']}, D = {settings['head_dim']}, {settings['dtype']}"
    interrupted = " The run was interrupted." if meta.get("interrupted") else ""
    threads = f"{meta['threads']} thread" + ("" if meta["threads"] == 1 else "s")
    lines = [
        f"**{kind.capitalize()} attention{decay}**, {shape}.",
        "Median time of one call, and peak memory with inputs and outputs.",
        f"{meta['device']}, {threads}, torch {versions['torch']}, {meta['date'][:10]}, seed {meta['seed']}:",
        f"`{meta['command']}`.{interrupted}",
        "",
    ]
    for pass_name in dict.fromkeys(row["pass_name"] for row in rows):
        lines += [*_pass_table(pass_name, rows, result.get("growth", [])), ""]
    lines += [_how_right(rows), ""]
    chart = path.with_suffix(".png")
    if chart.exists():
        lines += [f"![time and memory against length]({chart.relative_to(path.parents[2]).as_posix()})", ""]
    return "\n".join(lines)


def _pass_table(pass_name: str, rows: list[dict[str, Any]], growth: list[dict[str, Any]]) -> list[str]:
    """Lengths down, contenders across; the last line is the measured power of T."""
    own = [row for row in rows if row["pass_name"] == pass_name]
    contenders = list(dict.fromkeys(row["contender"] for row in own))
    cells = {(row["length"], row["contender"]): _cell(row) for row in own}
    lines = [f"| {pass_name}, T | " + " | ".join(contenders) + " |", "|---:|" + "---:|" * len(contenders)]
    for length in sorted({row["length"] for row in own}):
        lines.append(f"| {length} | " + " | ".join(cells.get((length, c), "") for c in contenders) + " |")
    powers = {g["contender"]: f"T^{g['exponent']:.2f}" for g in growth if g["pass_name"] == pass_name}
    if powers:
        lines.append("| time grows with | " + " | ".join(powers.get(c, "") for c in contenders) + " |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    memory = row["peak_bytes"]
    return f"{_digits(row['median_ms'])} ms" + ("" if memory is None else f", {_digits(memory / 2**20)} MiB")


def _digits(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _how_right(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row["status"] == "ok" and row["error"] is not None and row["budget"]]
    if not checked:
        return "No row was checked."
    worst = max(row["error"] / row["budget"] for row in checked)
    wrong = sum(row["status"] == "WRONG" for row in rows)
    left_out = sum(row["status"] == "left out" for row in rows)
    return (
        f"{len(checked)} rows were checked in the same run and used at most {worst:.0%} of their error budget; "
        f"{wrong} were wrong, {left_out} left out as too slow or too large."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of the README and of pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is stale")
    check = parser.parse_args().check
    if not check:
        draw_charts(RESULTS)
    stale = []
    for page, parts in (
        (README, generated_parts()),
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
