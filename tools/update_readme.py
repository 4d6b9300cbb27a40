"""Rewrite the generated parts of the README: ``python tools/update_readme.py``, or with ``--check`` only compare.

A part lies between ``<!-- name:begin -->`` and ``<!-- name:end -->``. The mechanisms come from the registry, the
measurements from ``results/cpu/*.json``.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from linattn.mechanisms.table import markdown_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "cpu"
NO_RESULTS = "No results are recorded yet: `make bench` writes them to `results/cpu`, `make readme` puts them here.\n"


def fill(text: str, parts: dict[str, str]) -> str:
    """``text`` with every part renewed; a missing or doubled marker is an error."""
    for name, content in parts.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"the README must have the part {name!r} once, between {begin.strip()} and {end}")
        head, rest = text.split(begin)
        text = head + begin + content + end + rest.split(end)[1]
    return text


def generated_parts(results: Path = RESULTS) -> dict[str, str]:
    return {"mechanisms": markdown_table(), "results": results_text(results)}


def results_text(folder: Path) -> str:
    """One part per result file, in the order of their names."""
    files = sorted(folder.glob("*.json"))
    return "\n".join(_result_text(path) for path in files) or NO_RESULTS


def _result_text(path: Path) -> str:
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
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of the README.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is stale")
    check = parser.parse_args().check
    old = README.read_text()
    new = fill(old, generated_parts())
    if check:
        print("README.md is stale: run `make readme`" if old != new else "README.md is up to date")
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
