"""Tables of the race: contenders case by case, then the goals."""

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from linattn.lab.bench.kernels.rows import KernelRow, KernelsResult, Outcome
from linattn.lab.bench.passes import FORWARD, TRAINING

COLORS = {"WRONG": "bold red", "failed": "bold red", "absent": "dim", "left out": "dim"}
WIDE_SCREEN = 118


def setting(result: KernelsResult) -> str:
    """The device, and the ceilings on which the floors are based."""
    meta = result.meta
    text = f"{meta['device']}, {meta['settings']['dtype']}"
    if "copy_bytes_per_second" not in meta:
        return text
    copy, matmul = meta["copy_bytes_per_second"] / 1e12, meta["matmul_per_second"] / 1e12
    return f"{text}, copy {copy:.3g} TB/s, matmul {matmul:.3g} TFLOP/s"


def kernels_table(result: KernelsResult, width: int = WIDE_SCREEN) -> Table:
    """A table with one line per contender and both passes side by side.

    ``x``: time over the floor; ``called``: forward as called from Python, with the host's work; ``extra``: memory
    beyond inputs, outputs and gradients, as a share of q, k, v and o; ``budget``: the share that the error used.
    Reasons for missing numbers are below the table.
    """
    wide = width >= WIDE_SCREEN
    table = Table(title=setting(result), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case / contender", no_wrap=True, min_width=20)
    headers = ["fwd ms", "x", "f+b ms", "x", *(["called", "extra fwd", "f+b"] if wide else []), "budget"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", max_width=26)
    said = _remarks(result)
    for case in result.case_names():
        own = [row for row in result.rows if row.case == case]
        floors = {row.pass_name: row.floor_ms for row in own if row.floor_ms is not None}
        floor = [_ms(floors.get(FORWARD)), "1", _ms(floors.get(TRAINING)), "1" if TRAINING in floors else ""]
        blank = [""] * (len(headers) - 4)
        table.add_row(f"[bold]{case}[/], floor", *floor, *blank, f"[dim]{own[0].shape}[/]")
        names = list(dict.fromkeys(row.contender for row in own))
        for name in names:
            rows = {row.pass_name: row for row in own if row.contender == name}
            remark = _remark(list(rows.values()), said)
            table.add_row(f"  {name}", *_cells(rows, wide), remark, end_section=name == names[-1])
    table.caption = "\n".join(f"[{i}] {escape(text)}".replace("[", r"\[", 1) for text, i in said.items())
    table.caption_justify = "left"
    return table


def _remarks(result: KernelsResult) -> dict[str, int]:
    """Every remark once, with its number."""
    texts = dict.fromkeys(t for row in result.rows for t in (row.reason, row.note) if t)
    return {text: i for i, text in enumerate(texts, start=1)}


def goals_table(outcomes: list[Outcome]) -> Table:
    """All goals for time and cold starts; of those for memory, the missed ones."""
    reached = sum(o.reached is True for o in outcomes)
    measured = sum(o.reached is not None for o in outcomes)
    title = f"goals: {reached} of {measured} measured ones reached, {len(outcomes) - measured} not measured"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("case", "what", "goal", "is", "by", ""):
        table.add_column(header, justify="right" if header in ("is", "by") else "left", no_wrap=header in ("is", "by"))
    for o in (o for o in outcomes if o.what in (FORWARD, TRAINING, "cold start") or not o.reached):
        table.add_row(o.case, o.what, o.goal, _number(o.value), _number(o.factor), _word(o))
    return table


def _word(outcome: Outcome) -> str:
    reason = f" [dim]{escape(outcome.reason)}[/]" if outcome.reason else ""
    if outcome.reached is None:
        return f"[dim]not measured[/]{reason}"
    return ("[green]reached[/]" if outcome.reached else "[red]not reached[/]") + reason


def _cells(rows: dict[str, KernelRow], wide: bool) -> list[str]:
    cells: list[str] = []
    for pass_name in (FORWARD, TRAINING):
        row = rows.get(pass_name)
        cells += ["", ""] if row is None else [_ms(row.median_ms), _number(row.over_floor)]
    if wide:
        cells.append(_ms(rows[FORWARD].called_ms) if FORWARD in rows else "")
        for pass_name in (FORWARD, TRAINING):
            share = rows[pass_name].extra_over_qkvo if pass_name in rows else None
            cells.append("" if share is None else f"{share:.0%}")
    used = [row.error / row.budget for row in rows.values() if row.error is not None and row.budget]
    cells.append(f"{max(used):.0%}" if used else "")
    return cells


def _remark(rows: list[KernelRow], said: dict[str, int]) -> str:
    """Problems of a contender, once if both passes have the same, as numbers of remarks."""
    found = dict.fromkeys(
        f"[{COLORS[r.status]}]{r.status}[/] {_mark(said, r.reason)}" for r in rows if r.status != "ok"
    )
    return " ".join([*found, *dict.fromkeys(_mark(said, row.note) for row in rows if row.note)])


def _mark(said: dict[str, int], text: str) -> str:
    return f"[dim]\\[{said[text]}][/]" if text else ""


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
