"""``linattn graph compare``: from a config to trained runs, tables and files."""

from json import loads
from typing import Any

from rich.console import Console

from linattn.compare.cells import Cell, CellResult
from linattn.compare.compare import FAILED, INTERRUPTED, RIGHT, announce, remembered, same_settings
from linattn.compare.graph.settings import GraphCompareConfig
from linattn.compare.graph.subject import Graphs
from linattn.compare.results import Results
from linattn.compare.screen import Screen, final_table
from linattn.report import write_csv
from linattn.tasks.graph import load_graph


def compare_graphs(config: GraphCompareConfig, console: Console) -> int:
    """Run the comparison, or go on with it; returns the exit code: 1 if a run failed, 130 after Ctrl-C."""
    config.check()
    subject = Graphs(config, load_graph(config.data))
    subject.check()
    same_settings(config)
    results = Results(config, subject, subject.describe())
    screen = Screen(results, console)
    announce(config, results, console)
    trainer = subject.trainer(screen.on_step, screen.on_record)

    def run(cells: list[Cell], into: list[CellResult]) -> None:
        screen.expect(len(cells))
        into.extend(CellResult(cell) for cell in cells)
        for cell in cells:
            into[cells.index(cell)] = result = trainer.run(cell)
            screen.on_result(result)
            results.save()

    try:
        with screen.shown():
            run(sweep(config), results.swept)
            results.lrs = chosen_lrs(subject, results.swept)
            run(finals(config, results.lrs), results.final)
            names = [r.cell.mechanism for r in results.final if r.status == "done" and r.cell.seed == 0]
            key = {"data": results.meta["data"], "device": results.meta["device"],
                   "models": {name: subject.details(name) for name in names}}  # fmt: skip
            results.costs = remembered(config.output / "costs.json", key, lambda: subject.costs(names, screen.on_work))
    except KeyboardInterrupt:
        results.save()
        words = f"Interrupted; finished runs are kept. The same command goes on: {results.meta['command']}"
        console.print(words, soft_wrap=True)
        return INTERRUPTED
    results.finished = True
    results.save()
    found: dict[str, Any] = loads((config.output / "results.json").read_text())
    write_csv(found, config.output / "results.csv")
    console.print(final_table(found))
    for row in found["rows"]:
        if row["status"] == "failed":
            console.print(f"failed: {row['mechanism']}, seed {row['seed']}: {row['reason']}", soft_wrap=True)
    console.print(f"results: {config.output / 'results.json'}", soft_wrap=True)
    return RIGHT if all(result.status == "done" for result in results.final) else FAILED


def sweep(config: GraphCompareConfig) -> list[Cell]:
    """The runs that choose a learning rate; none where there is no choice."""
    lrs = sorted(set(config.lrs))
    return [Cell(name, 0, lr, validation=True) for name in config.models for lr in lrs if len(lrs) > 1]


def finals(config: GraphCompareConfig, lrs: dict[str, float]) -> list[Cell]:
    """Seed by seed: each split is made once, and after the first round every model has a result."""
    return [Cell(name, seed, lrs[name]) for seed in range(config.seeds) for name in config.models]


def chosen_lrs(subject: Graphs, swept: list[CellResult]) -> dict[str, float]:
    """For each model the learning rate of the best validation score, the smaller one of equals; without a sweep the one
    that was named, or its recipe's."""
    config, lrs = subject.config, {}
    for name in config.models:
        found = [r for r in swept if r.cell.mechanism == name and r.score is not None]
        only = config.lrs[0] if config.lrs else config.train_of(name, subject.data.name, 0).lr
        lrs[name] = max(found, key=lambda r: (r.score or 0.0, -r.cell.lr)).cell.lr if found else only
    return lrs
