"""Tables of results for the screen."""

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from linattn.lab.bench.rows import Result, Row

COLORS = {"WRONG": "bold red", "left out": "dim", "failed": "bold red"}


# The columns that a screen of 80 characters has room for; a wider one shows all.
ALL = ("ms", "p20-p80", "vs sdpa", "vs chunked", "peak MiB", "x qkvo", "error", "of budget")
NARROW = ("ms", "vs sdpa", "peak MiB", "error")
WIDE_SCREEN = 115


def result_table(result: Result, pass_name: str, width: int = WIDE_SCREEN) -> Table:
    """Rows of one pass, by length, for a screen of that width."""
    columns = ALL if width >= WIDE_SCREEN else NARROW
    table = Table(title=f"{pass_name}: {setting(result)}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("T", justify="right", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right", no_wrap=header != "vs chunked")
    table.add_column("checked against")
    order = [name for name, _ in result.series()]
    rows = [row for row in result.rows if row.pass_name == pass_name]
    rows.sort(key=lambda row: (row.length, order.index(row.contender)))
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].length != row.length
        numbers = _numbers(row)
        table.add_row(
            str(row.length), row.contender, *(numbers.get(c, "") for c in columns), _remark(row), end_section=last
        )
    if any(row.status == "left out" for row in rows):
        table.caption = "left out by predicted cost; --max-seconds and --max-gib move the limits"
        table.caption_justify = "left"
    return table


def setting(result: Result) -> str:
    """What was measured, and on which machine."""
    settings = result.meta["settings"]
    kind = "causal" if settings["causal"] else "bidirectional"
    decay = "" if settings["decay"] == "none" else f", {settings['decay']} decay"
    shape = f"B{settings['batch']} H{settings['heads']} D{settings['head_dim']}"
    threads = f"{result.meta['threads']} thread{'s' if result.meta['threads'] > 1 else ''}"
    return f"{kind}{decay}, {shape} {settings['dtype']}, {result.meta['device']}, {threads}"


def growth_table(result: Result) -> Table:
    """The exponent of ``time ~ T^p`` for each contender."""
    growth = result.growth()
    passes = list(dict.fromkeys(g["pass_name"] for g in growth))
    table = Table(title="growth: p of time ~ T^p", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("contender")
    for pass_name in passes:
        table.add_column(pass_name, justify="right")
    for contender in dict.fromkeys(g["contender"] for g in growth):
        found = {g["pass_name"]: g["exponent"] for g in growth if g["contender"] == contender}
        table.add_row(contender, *(_number(found.get(p), ".2f") for p in passes))
    return table


def _numbers(row: Row) -> dict[str, str]:
    if row.median_ms is None:
        return {}
    right = row.status == "ok" and row.error is not None and row.budget
    return {
        "ms": f"{row.median_ms:.4g}",
        "p20-p80": f"{row.p20_ms:.4g}-{row.p80_ms:.4g}",
        "vs sdpa": _number(row.speedup_over_sdpa, ".3g", "x"),
        "vs chunked": _number(row.speedup_over_chunked, ".3g", "x"),
        "peak MiB": _number(None if row.peak_bytes is None else row.peak_bytes / 2**20, ".4g"),
        "x qkvo": _number(row.peak_over_qkvo, ".3g"),
        "error": _number(row.error, ".1e"),
        "of budget": f"{row.error / row.budget:.0%}" if right and row.error and row.budget else "",
    }


def _remark(row: Row) -> str:
    if row.status == "ok":
        return row.checked_against
    color = COLORS[row.status]
    if row.status == "WRONG":
        return f"[{color}]WRONG[/]: {row.worst_tensor}, against {row.checked_against}; allowed {row.budget:.1e}"
    return f"[{color}]{row.status}: {escape(row.reason)}[/]"


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{spec}}{unit}"
