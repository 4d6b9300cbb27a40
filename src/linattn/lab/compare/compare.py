"""Runs a comparison: trains, measures, and writes tables, files and a report."""

from importlib.util import find_spec
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linattn.lab.compare.cells import Cell, CellResult, best_lrs, final_cells, folder_name, runs_to_train, sweep_cells
from linattn.lab.compare.conversion.settings import ConversionConfig
from linattn.lab.compare.conversion.subject import Conversions
from linattn.lab.compare.images import Images
from linattn.lab.compare.measure import groups_to_measure
from linattn.lab.compare.results import Results
from linattn.lab.compare.screen import Screen, final_table
from linattn.lab.compare.settings import CompareConfig
from linattn.lab.compare.subject import Comparing, Subject
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.lab.compare.workers import workers
from linattn.lab.page.numbers import counted
from linattn.lab.pages import edge_sentence, ranking_sentence, write_csv, write_report
from linattn.lab.tasks.load import load_images
from linattn.lab.train.text.config import AS_EVER
from linattn.support.extras import need
from linattn.support.files import write_json
from linattn.support.options import OptionError, check_folder

RIGHT, FAILED, INTERRUPTED = 0, 1, 130
AnyConfig = CompareConfig | ConversionConfig | TextCompareConfig


def create_subject(config: AnyConfig) -> Subject:
    """Create the subject for a config, with its data loaded."""
    need("a comparison", "accelerate")
    if isinstance(config, TextCompareConfig):
        return Texts(config)
    data = load_images(config.data, image_size=config.image_size)
    return Conversions(config, data) if isinstance(config, ConversionConfig) else Images(config, data)


def compare(config: AnyConfig, console: Console) -> int:
    """Run or resume a comparison. Returns the exit code: 1 if a run failed, 130 after Ctrl-C."""
    config.check()
    check_folder("output", config.output)
    subject = create_subject(config)
    subject.check()
    same_settings(config)
    results = Results(config, subject, subject.describe())
    screen = Screen(results, console, runs_to_train(config, subject.sweep_is_final))
    announce(config, results, console)
    trainer = subject.trainer(screen.on_step, screen.on_record)
    trainer.on_work = screen.on_work
    device = torch.device(config.train.device)

    def run(cells: list[Cell], into: list[CellResult], in_workers: Any) -> None:
        into.extend(CellResult(cell) for cell in cells)
        screen.begin(cells, config.output)
        done = in_workers(cells, screen.on_work) if config.jobs > 1 else map(trainer.run, cells)
        for result in done if cells else ():
            into[cells.index(result.cell)] = result
            screen.on_result(result)
            results.save()

    try:
        with screen.shown():
            results.costs = subject.known_costs(screen.on_work)
            for names in groups_to_measure(list(config.mechanisms), device):  # an earlier call may have measured them
                results.costs |= earlier(*cost_key(config.output, results.meta, subject, names)) or {}
            subject.prepare(screen.on_work)
            with workers(config) as in_workers:
                run(sweep_cells(config), results.swept, in_workers)
                results.lrs = best_lrs(config, results.swept, subject.metric.higher, subject.recipe_lr)
                final = final_cells(config, results.lrs)
                screen.expect(final, adopted={cell for cell in final if subject.adopt(cell)})
                run(final, results.final, in_workers)
            trained = [r.cell for r in results.final if r.status == "done" and r.cell.seed == 0]
            # Only trained ones: what failed in training would fail again, and the results of the others would be lost.
            for names in groups_to_measure([cell.mechanism for cell in trained], device):
                file, key = cost_key(config.output, results.meta, subject, names)
                results.costs |= earlier(file, key) or measured(file, key, subject.costs(names, screen.on_work))
                results.save()  # what follows may take long or fail, and this must not be lost
            results.attention, examples = subject.attention(trained, screen.on_work)
    except KeyboardInterrupt:
        results.save()
        words = f"Interrupted; finished runs are kept. The same command goes on: {results.meta['command']}"
        console.print(words, soft_wrap=True)
        return INTERRUPTED
    results.finished = True
    results.save()
    if examples is not None:
        write_json(config.output / "examples.json", examples)
    finish(config.output, console, subject.has_report)
    return RIGHT if all(result.status == "done" for result in results.final) else FAILED


def cost_key(output: Path, meta: dict[str, Any], subject: Subject, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """The file for the costs of mechanisms that are measured together, and a key of all that they depend on."""
    # These do not affect times, and earlier versions did not write them, whose measurements stay valid.
    train = {name: value for name, value in meta["train"].items() if name not in ("schedule", "eps", "energy_loss")}
    key = train | {"mechanisms": names, "device": meta["device"]}
    key["details"] = [subject.details(name) for name in names]
    name = folder_name(names[0]) if len(names) == 1 else "together"
    return output / "costs" / f"{name}.json", loads_like(key)


def earlier(path: Path, key: dict[str, Any]) -> Any:
    """What an earlier call measured and saved with the same key, or None."""
    stored = loads(path.read_text()) if path.exists() else {"key": None}
    return stored["found"] if stored["key"] == key else None


def measured(path: Path, key: dict[str, Any], found: Any) -> Any:
    """Save ``found`` for later calls, and return it."""
    write_json(path, {"key": key, "found": found})
    return found


def announce(config: Comparing, results: Results, console: Console) -> None:
    """Print what is about to be run, and how many runs there are."""
    runs, swept = len(config.mechanisms) * config.seeds, len(sweep_cells(config))
    joined = f", {len(config.mechanisms)} of them taken from" if results.subject.sweep_is_final else " after"
    console.print(
        f"{results.subject.announce(results.meta)}: "
        f"{counted(runs, 'run')} ({counted(len(config.mechanisms), 'mechanism')} x {counted(config.seeds, 'seed')})"
        + (f"{joined} {counted(swept, 'run')} that choose learning rates" if swept else "")
        + (f", {config.jobs} at a time" if config.jobs > 1 else "")
        + f". Files: {config.output}",
        soft_wrap=True,
    )


def finish(folder: Path, console: Console, has_report: bool = True) -> None:
    """Print tables, write CSV files and, if the subject has one and charts can be drawn, the report."""
    results: dict[str, Any] = loads((folder / "results.json").read_text())
    write_csv(results, folder / "results.csv")
    console.print(final_table(results))
    if has_report:
        for sentence in filter(None, (ranking_sentence(results), edge_sentence(results))):
            console.print(sentence, soft_wrap=True)
    for row in results["rows"]:
        if row["status"] == "failed":
            console.print(f"failed: {row['mechanism']}, seed {row['seed']}: {row['reason']}", soft_wrap=True)
    if not has_report:
        console.print(f"results: {folder / 'results.json'}", soft_wrap=True)
        return
    if find_spec("matplotlib") is None:
        console.print("No report: its charts need matplotlib, pip install 'linattn[report]', then linattn report")
        return
    console.print(f"report: {write_report(folder)}", soft_wrap=True)


def same_settings(config: Comparing) -> None:
    """Raise if the folder holds a comparison with other settings; mechanisms and seeds may be added to it.

    New mechanisms add their options; mechanisms that are left out this time keep the options they had.
    """
    path, wanted = config.output / "settings.json", loads_like(config.fingerprint())
    if not path.exists():
        write_json(path, wanted)
        return
    stored = loads(path.read_text())
    stored.setdefault("content", wanted.get("content"))  # earlier versions did not save the digest of files
    different = [name for name in wanted if stored.get(name) != wanted[name]]
    if "content" in different:
        raise OptionError("output", f"{config.output} holds a comparison on other data: the files have changed since")
    joined = None
    if "options" in different and isinstance(config, CompareConfig | ConversionConfig):
        joined = joined_options(config, stored.get("options") or {}, wanted["options"] or {})
        different = [name for name in different if name != "options" or joined is None]
    if different:
        words = ", ".join(f"{n} was {_told(n, stored.get(n))}, now {_told(n, wanted[n])}" for n in different)
        raise OptionError("output", f"{config.output} holds a comparison with other settings ({words}): name another")
    if joined is not None:
        write_json(path, stored | {"options": joined or None})


def _told(name: str, value: object) -> object:
    """A setting in the words of the user; None, for what earlier versions did not save, becomes its value then."""
    return AS_EVER.get(name) if value is None else value


def joined_options(
    config: CompareConfig | ConversionConfig, stored: dict[str, Any], wanted: dict[str, Any]
) -> dict[str, Any] | None:
    """Options of all mechanisms in a folder; None if a mechanism with runs in the folder is now given others."""
    for name in config.mechanisms:
        folders = (Cell(name, 0, 0.0, validation).folder(config.output).parent for validation in (False, True))
        if stored.get(name) != wanted.get(name) and any(folder.exists() for folder in folders):
            return None
    others = {name: own for name, own in stored.items() if name not in config.mechanisms}
    return others | {name: own for name, own in wanted.items() if name in config.mechanisms}


def loads_like(value: dict[str, Any]) -> dict[str, Any]:
    """The value as it is loaded from a JSON file, with lists in place of tuples."""
    found: dict[str, Any] = loads(dumps(value))
    return found
