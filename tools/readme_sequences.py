"""The parts of docs/sequences.md on speed: decoding and training throughput."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from readme_parts import chart_line, markdown, three_digits, where

from linattn.lab.bench.decoding import overtakes
from linattn.lab.bench.series import crossovers

SOFTMAX = "softmax"


def decoding_text(path: Path) -> str:
    """Contexts down, mechanisms across, for every batch: time of a token and memory; of the fastest mode measured."""
    result = json.loads(path.read_text())
    meta, rows, model = result["meta"], result["rows"], result["meta"]["model"]
    lines = [
        f"**Decoding**: {model['depth']} layers of {model['width']}, {model['vocabulary']:,} tokens of vocabulary, "
        f"{meta['settings']['dtype']}; milliseconds a token, and in brackets the MiB of keys and values or of states.",
        where(meta),
        "",
    ]
    modes = list(dict.fromkeys(row["mode"] for row in rows if row["status"] != "absent"))
    mode = modes[-1] if modes else ""
    for batch in dict.fromkeys(row["batch"] for row in rows):
        own = [row for row in rows if (row["batch"], row["mode"]) == (batch, mode)]
        head, table = _across(own, "context", _decoding_cell)
        lines += [f"Batch {batch}, {mode}:", "", *markdown(head, table, numbers_from=0), ""]
    lines += [_overtakes(overtakes(rows), mode), _checked(rows)]
    return "\n".join([*lines, *chart_line(path, "time and memory of a decoded token against the context"), ""])


def throughput_text(path: Path) -> str:
    """Lengths down, mechanisms across."""
    result = json.loads(path.read_text())
    meta, rows, model = result["meta"], result["rows"], result["meta"]["model"]
    head, table = _across(rows, "length", _throughput_cell)
    lines = [
        f"**Training**: {model['depth']} layers of {model['width']}, {meta['settings']['tokens']:,} tokens a step, "
        f"{meta['settings']['dtype']}, compiled; thousand tokens a second, and how many times softmax's.",
        where(meta),
        "",
        *markdown(head, table, numbers_from=0),
        "",
        _overtakes(crossovers(rows, "length", SOFTMAX, "training"), "training"),
        _checked(rows),
    ]
    return "\n".join([*lines, *chart_line(path, "training tokens a second against the length"), ""])


def _across(
    rows: list[dict[str, Any]], down: str, cell: Callable[[dict[str, Any], dict[str, Any] | None], str]
) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with mechanisms across; each cell sees softmax's row too."""
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    found = {(row[down], row["mechanism"]): row for row in rows}
    lines = [
        [f"{size:,}", *(cell(found[size, n], found.get((size, SOFTMAX))) if (size, n) in found else "" for n in names)]
        for size in sorted({row[down] for row in rows})
    ]
    return [down, *(f"`{name}`" for name in names)], lines


def _decoding_cell(row: dict[str, Any], _: dict[str, Any] | None) -> str:
    if row.get("median_ms") is None:
        return str(row["status"])
    return f"{three_digits(row['median_ms'])} ({three_digits(row['state_bytes'] / 2**20)})"


def _throughput_cell(row: dict[str, Any], softmax: dict[str, Any] | None) -> str:
    if row.get("tokens_per_second") is None:
        return str(row["status"])
    speed = three_digits(row["tokens_per_second"] / 1000)
    if row["mechanism"] == SOFTMAX or softmax is None or softmax.get("tokens_per_second") is None:
        return speed
    return f"{speed} ({row['tokens_per_second'] / softmax['tokens_per_second']:.2f}x)"


def _overtakes(overtaken: Iterable[dict[str, Any]], setting: str) -> str:
    words = []
    for found in overtaken:
        if setting not in found["setting"]:
            continue
        at = "nowhere" if found["length"] is None else f"from {found['length']:,.0f} tokens on"
        batch = found["setting"].split(",")[0] + ", " if "batch" in found["setting"] else ""
        words.append(f"`{found['mechanism']}` {batch}{at} ({found['gain']:.3g}x at {found['longest']:,})")
    return f"Faster than softmax: {'; '.join(words)}." if words else ""


def _checked(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row.get("budget")]
    worst = max((row["error"] / row["budget"] for row in checked if row["status"] != "WRONG"), default=0)
    bad = [
        f"{row['mechanism']} ({row['status']}: {row.get('reason', '')})"
        for row in rows
        if row["status"] in ("WRONG", "failed")
    ]
    left = sum(row["status"] == "left out" for row in rows)
    said = f" Wrong or failed: {'; '.join(bad)}." if bad else ""
    said += f" {left} rows are not measured yet." if left else ""
    return f"{len(checked)} rows were checked in the same run and used at most {worst:.0%} of their error budget.{said}"
