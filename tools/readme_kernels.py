"""Kernels, from ``results/<device>/kernels.json`` of `linattn kernels`: a selection for the README, all on a page."""

import json
from pathlib import Path
from typing import Any

from readme_parts import chart_line, three_digits

from linattn.lab.bench.kernel_cases import OURS, outcomes

PASSES = ("forward", "forward+backward")


# One of each kind, the slowest over the floor among them.
SELECTED = (
    "causal-4096", "causal-norm-4096", "causal-token-4096", "causal-channel-4096", "exponential-4096", "causal-32768",
    "relu-196", "mirror-196", "nala-16384", "pola-16384", "quadratic-16384", "lion-16384",
)  # fmt: skip


def selection_text(path: Path) -> str:
    """Some cases: time, over the floor, the fastest other way and flash softmax, each of forward and backward."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    goals = outcomes(rows)
    lines = [
        f"{meta['device']}, {meta['settings']['dtype']}, torch {meta['versions']['torch']}, {meta['date'][:10]}, "
        "`linattn kernels`: forward and backward together, in ms.",
        "",
        "| case | shape | linattn | x floor | next best | flash softmax |",
        "|---|---|" + "---:|" * 4,
    ]
    for case in SELECTED:
        own = [row for row in rows if (row["case"], row["pass_name"]) == (case, PASSES[1])]
        if own:
            lines.append(f"| `{case}` | {own[0]['shape']} | " + " | ".join(_pass_cells(own)) + " |")
    return "\n".join([*lines, "", *_goals(goals)[:1], ""])


def kernels_text(path: Path) -> str:
    """Cases down; for each pass the time, over the floor, the fastest other linear attention, and flash softmax."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    goals = outcomes(rows)
    copy, matmul = meta["copy_bytes_per_second"] / 1e12, meta["matmul_per_second"] / 1e12
    versions = meta["versions"]
    rivals = ", ".join(f"{name} {versions[name]}" for name in ("fla-core", "mlstm_kernels") if name in versions)
    head = " | ".join(f"{name}, ms | x floor | next best | flash softmax" for name in PASSES)
    lines = [
        f"**Kernels**, {meta['settings']['dtype']}, median of one call, replayed as a CUDA graph where it can be "
        "captured. The floor is what memory and arithmetic allow, "
        f"by a copy at {copy:.2f} TB/s and a product at {matmul:.0f} TFLOP/s in the same run; next best is the fastest "
        "other way to compute the same, where it is right.",
        f"{meta['device']}, torch {versions['torch']}, Triton {versions['triton']}, {rivals}, {meta['date'][:10]}: "
        f"`{meta['command']}`.",
        "",
        f"| case | shape | {head} | goals |",
        "|---|---|" + "---:|" * 8 + "---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows if row["pass_name"] in PASSES):
        own = [row for row in rows if row["case"] == case]
        cells = [cell for name in PASSES for cell in _pass_cells([r for r in own if r["pass_name"] == name])]
        reached = [g["reached"] for g in goals if g["case"] == case]
        word = f"{sum(r is True for r in reached)} of {len(reached)}" if reached else ""
        lines.append(f"| `{case}` | {own[0]['shape']} | " + " | ".join(cells) + f" | {word} |")
    return "\n".join([*lines, "", *_goals(goals), _checked(rows), *chart_line(path, "time over floor"), ""])


def _pass_cells(rows: list[dict[str, Any]]) -> list[str]:
    times = {row["contender"]: row["median_ms"] for row in rows if row["status"] == "ok" and row.get("median_ms")}
    ours = next((row for row in rows if row["contender"] == OURS), None)
    others = {name: ms for name, ms in times.items() if not name.startswith(("linattn", "SDPA"))}
    best = min(others, key=lambda name: others[name], default=None)
    flash = times.get("SDPA flash")
    if ours is None or OURS not in times:
        mine = ["" if ours is None else ours["status"], ""]
    else:
        mine = [three_digits(times[OURS]), f"{ours['over_floor']:.2f}"]
    rival = "" if best is None else f"{three_digits(others[best])} ({best})"
    return [*mine, rival, "" if flash is None else three_digits(flash)]


def _goals(goals: list[dict[str, Any]]) -> list[str]:
    """How many are reached; what is not, and by how much; cold starts."""
    measured = [g for g in goals if g["reached"] is not None]
    missed = [g for g in measured if not g["reached"]]
    cold = [f"{g['value']:.1f} s (`{g['case']}`)" for g in measured if g["what"] == "cold start"]
    lines = [f"{len(measured) - len(missed)} of {len(measured)} measured goals are reached."] if measured else []
    lines += [f"First call in a fresh process with empty caches: {', '.join(cold)}."] if cold else []
    if missed:
        texts = [f"`{g['case']}` {g['what']} {g['goal']}: {g['value']:.2f}" for g in missed]
        lines.append(f"Not reached: {'; '.join(texts)}.")
    return [*lines, ""] if lines else []


def _checked(rows: list[dict[str, Any]]) -> str:
    ours = [row for row in rows if row["contender"].startswith("linattn") and row.get("error") is not None]
    right = [row for row in ours if row["status"] == "ok"]
    worst = max((row["error"] / row["budget"] for row in right), default=0)
    wrong: dict[tuple[str, str], list[str]] = {}  # the cases of a contender, with what is known of it
    for row in rows:
        if row["status"] == "WRONG":
            cases = wrong.setdefault((row["contender"], row.get("note", "")), [])
            cases += [row["case"]] if row["case"] not in cases else []
    texts = [f"{name} in {', '.join(cases)}{f' ({note})' if note else ''}" for (name, note), cases in wrong.items()]
    said = f" Wrong: {'; '.join(texts)}." if texts else ""
    return (
        f"{len(right)} of {len(ours)} rows of this library were right against fp64 in the same run, and used at most "
        f"{worst:.0%} of their error budget.{said}"
    )
