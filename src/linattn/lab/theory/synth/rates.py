"""A table without final runs: each contender's score on held-out data at its best learning rate."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from linattn.lab.compare.cells import CellResult, best_lrs, sweep_cells
from linattn.lab.compare.compare import FAILED, RIGHT
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.lab.theory.synth.merge import merged
from linattn.lab.theory.synth.settings import SynthConfig
from linattn.lab.theory.synth.table import on_screen, paper_table
from linattn.support.files import write_json

SCORED_ON = "held-out data, the same that the learning rate was chosen by; one run at each rate"


def tabulate_rates(config: SynthConfig, console: Console) -> int:
    """Train what is not trained yet and write ``table.json``; returns the exit code, 1 if a run failed."""
    found, failed = {}, list[CellResult]()
    with console.status("") as status:
        for kind, part in config.parts.items():
            found[kind], bad = _part(part, status.update)
            failed += bad
    results = merged(found)
    rows = paper_table(results, config.metrics)
    for row in rows:
        row["rates"] = {}
    by_key = {(row["mechanism"], row["positions"], row["canon"]): row for row in rows}
    for entry in results["mechanisms"]:
        row = by_key[entry["pattern"], entry["position"], entry["canon"] or "none"]
        row["rates"][str(entry["width"])] = entry["rates"]
    write_json(config.output / "table.json", {"meta": results["meta"], "rows": rows})
    console.print(on_screen(rows))
    for result in failed:
        console.print(f"failed: {result.cell.title}: {result.reason}", soft_wrap=True)
    console.print(f"Scored on {SCORED_ON}.", soft_wrap=True)
    console.print(f"table: {config.output / 'table.json'}", soft_wrap=True)
    return FAILED if failed else RIGHT


def _part(part: TextCompareConfig, on_work: Callable[[str], None]) -> tuple[dict[str, Any], list[CellResult]]:
    """Results in the form of a comparison, with each contender's best run in place of its final ones."""
    texts, swept = Texts(part), list[CellResult]()
    trainer = texts.trainer(lambda *_: None, lambda *_: None)
    for cell in sweep_cells(part):
        on_work(cell.title)
        swept.append(trainer.run(cell))
    lrs = best_lrs(part, swept, texts.metric.higher)
    done = [result for result in swept if result.status == "done"]
    entries = [
        {"mechanism": name, **texts.details(name),
         "rates": {f"{r.cell.lr:g}": r.score for r in done if r.cell.mechanism == name}}
        for name in part.mechanisms
    ]  # fmt: skip
    best = [result.as_row("score") for result in done if result.cell.lr == lrs[result.cell.mechanism]]
    meta = texts.describe() | {"finished": len(done) == len(swept), "scored_on": SCORED_ON}
    return {"meta": meta, "mechanisms": entries, "rows": best}, [r for r in swept if r.status != "done"]
