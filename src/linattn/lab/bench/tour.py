"""A tour in a minute or two: the mechanisms, the agreement of their forms, and where they beat softmax in speed."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from linattn.lab.bench.agreement import TOLERANCE, Agreement, HandOver, compare_all_forms, compare_hand_over
from linattn.lab.bench.catalog import mechanism_table
from linattn.lab.bench.chart import draw_chart
from linattn.lab.bench.contenders import SDPA
from linattn.lab.bench.fit import crossover
from linattn.lab.bench.passes import FORWARD
from linattn.lab.bench.rows import Result
from linattn.lab.bench.screen import INTERRUPTED, RIGHT, WRONG, Files, measure, show
from linattn.lab.bench.settings import BenchConfig
from linattn.support.extras import need

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Titles on the left may be wider than a small table.
STYLE: Any = {"title_justify": "left", "box": SIMPLE_HEAD, "min_width": 76}


def tour(folder: Path, console: Console, lengths: tuple[int, ...] = LENGTHS) -> int:
    """Print the tour and write chart and JSON to ``folder``; returns 1 if anything is wrong."""
    need("a chart", "matplotlib")
    console.rule("1. The mechanisms")
    console.print(mechanism_table())
    console.rule("2. One formula, three forms: the same numbers in fp64")
    agreements = compare_all_forms()
    console.print(agreement_table(agreements))
    console.rule("3. Cut a sequence anywhere, hand the state over: the same output")
    hand_overs = compare_hand_over()
    console.print(hand_over_table(hand_overs))
    console.rule("4. Softmax against linear attention, forward")
    config = BenchConfig(
        lengths=lengths, impl=("chunked", "reference"), backward=False, min_seconds=0.2, min_repeats=3, max_seconds=1
    )
    files = Files.in_folder(folder, "crossover", chart=True)
    result = measure(config, files, command=["linattn", "tour"])
    show(result, console)
    right = all(a.ok for a in agreements) and all(h.ok for h in hand_overs) and result.right
    _conclude(result, files, console)
    if not right:
        console.print("[bold red]something above is WRONG[/]")
    return INTERRUPTED if result.interrupted else RIGHT if right else WRONG


def crossover_sentence(result: Result) -> tuple[float | None, str]:
    """The length from which the chunked form is faster than softmax attention, as a number and in words."""
    softmax, linear = result.times(SDPA, FORWARD), result.times("chunked", FORWARD)
    point = crossover(softmax, linear)
    shared = sorted(softmax.keys() & linear.keys())
    if not shared:
        return None, "No length was measured for both, so there is no crossover to tell."
    gain = softmax[shared[-1]] / linear[shared[-1]]
    if point is None:
        return None, f"Softmax attention is the faster one up to T = {shared[-1]} ({1 / gain:.1f}x there)."
    if point == shared[0]:
        return point, f"Linear attention is faster at every length from T = {shared[0]}; {gain:.1f}x at {shared[-1]}."
    return point, f"Linear attention becomes faster at T = {point:.0f}, and is {gain:.1f}x faster at {shared[-1]}."


def agreement_table(agreements: list[Agreement]) -> Table:
    table = Table(title=f"largest difference of reference, recurrent, chunked (allowed: {TOLERANCE:g})", **STYLE)
    for header in ("mask", "decay", "values", "gradients", ""):
        table.add_column(header)
    for a in agreements:
        mask = "causal" if a.causal else "bidirectional"
        table.add_row(mask, a.decay, f"{a.values:.1e}", f"{a.gradients:.1e}", _word(a.ok))
    return table


def hand_over_table(hand_overs: list[HandOver]) -> Table:
    table = Table(title="causal, decay per token, 130 tokens: parts against the whole", **STYLE)
    for header in ("how", "largest difference", ""):
        table.add_column(header)
    for h in hand_overs:
        table.add_row(h.cut, f"{h.difference:.1e}", _word(h.ok))
    return table


def _conclude(result: Result, files: Files, console: Console) -> None:
    point, sentence = crossover_sentence(result)
    console.print(f"[bold]{sentence}[/]")
    if files.chart is not None and any(row.median_ms is not None for row in result.rows):
        draw_chart(result, files.chart, point)
        console.print(f"chart:   {files.chart}\nresults: {files.json}", soft_wrap=True)


def _word(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[bold red]WRONG[/]"
