"""Tables of `linattn bench` and `linattn memory`: time and memory of attention, and of one block, by length."""

import json
from pathlib import Path
from typing import Any

from readme_parts import chart_line, three_digits

from linattn.lab.bench.attention import growth


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
    return "\n".join([*lines, *chart_line(path, "memory against tokens"), ""])


def _memory_cell(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return f"{three_digits(row['peak_bytes'] / 2**20)} MiB, {three_digits(1000 * row['seconds'])} ms"


def attention_text(path: Path) -> str:
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    settings, versions = meta["settings"], meta["versions"]
    kind = "causal" if settings["causal"] else "bidirectional"
    decay = "" if settings["decay"] == "none" else f", decay per {settings['decay']}"
    shape = f"B = {settings['batch']}, H = {settings['heads']}, D = {settings['head_dim']}, {settings['dtype']}"
    threads = f"{meta['threads']} thread" + ("" if meta["threads"] == 1 else "s")
    lines = [
        f"**{kind.capitalize()} attention{decay}**, {shape}.",
        "Median time of one call, and peak memory with inputs and outputs.",
        f"{meta['device']}, {threads}, torch {versions['torch']}, {meta['date'][:10]}, seed {meta['seed']}:",
        f"`{meta['command']}`.",
        "",
    ]
    for pass_name in dict.fromkeys(row["pass_name"] for row in rows):
        lines += [*_pass_table(pass_name, rows, growth(rows)), ""]
    return "\n".join([*lines, _how_right(rows), *chart_line(path, "time and memory against length"), ""])


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
    memory = row.get("peak_bytes")
    return f"{three_digits(row['median_ms'])} ms" + ("" if memory is None else f", {three_digits(memory / 2**20)} MiB")


def _how_right(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row["status"] == "ok" and row.get("budget")]
    if not checked:
        return "No row was checked."
    worst = max(row["error"] / row["budget"] for row in checked)
    wrong = sum(row["status"] == "WRONG" for row in rows)
    left_out = sum(row["status"] == "left out" for row in rows)
    return (
        f"{len(checked)} rows were checked in the same run and used at most {worst:.0%} of their error budget; "
        f"{wrong} were wrong, {left_out} left out as too slow or too large."
    )
