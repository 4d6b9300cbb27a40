"""``linattn lab synth``: comparisons, one results file, a report and a table like the paper's."""

from dataclasses import replace
from importlib.util import find_spec
from json import loads

from rich.console import Console

from linattn.lab.compare.compare import FAILED, INTERRUPTED, RIGHT, compare, same_settings
from linattn.lab.compare.text.subject import Texts
from linattn.lab.pages import write_csv, write_report
from linattn.lab.theory.synth.merge import merged
from linattn.lab.theory.synth.plan import make_plan
from linattn.lab.theory.synth.pool import train_in_pool
from linattn.lab.theory.synth.rates import tabulate_rates
from linattn.lab.theory.synth.settings import SynthConfig
from linattn.lab.theory.synth.table import on_screen, paper_table
from linattn.lab.theory.synth.written import write_samples
from linattn.support.extras import need
from linattn.support.files import write_json


def run(config: SynthConfig, console: Console, *, plan_only: bool = False, measure: bool = True) -> int:
    """Show how long it takes, train what is not trained yet, write; returns the exit code of the comparisons.

    Writes to ``config.output``: a folder for each kind of positions, ``results.json``, ``results.csv``, ``table.json``,
    and with matplotlib ``report.html`` and ``charts``; without final runs only ``table.json``.
    """
    need("a laboratory of language models", "accelerate", "transformers", "safetensors")
    config.check()
    if measure:
        console.print(make_plan(config).words(), soft_wrap=True)
    if plan_only:
        return RIGHT
    try:
        left = train_together(config, console)
        if not config.final:
            return tabulate_rates(config, console)
    except KeyboardInterrupt:
        console.print("Interrupted; finished runs are kept, and the same command goes on.")
        return INTERRUPTED
    codes = []
    for kind, part in config.parts.items():
        console.rule(f"positions: {kind}")
        codes.append(compare(replace(part, jobs=part.jobs if kind in left else 1), console))
        if codes[-1] == INTERRUPTED:
            return INTERRUPTED
    finish(config, console)
    return FAILED if any(codes) else RIGHT


def train_together(config: SynthConfig, console: Console) -> set[str]:
    """Train all runs in one pool if several may run at a time; returns what comparisons still have to train."""
    if config.shared.jobs < 2:
        return set(config.parts)
    for part in config.parts.values():
        Texts(part).check()
        same_settings(part)
    with console.status("starting processes") as status:
        return train_in_pool(config, status.update)


def finish(config: SynthConfig, console: Console) -> None:
    found = {kind: loads((part.output / "results.json").read_text()) for kind, part in config.parts.items()}
    if config.samples:
        for kind, part in config.parts.items():
            write_samples(part, found[kind], config.samples, console)
    results = merged(found)
    write_json(config.output / "results.json", results)
    write_csv(results, config.output / "results.csv")
    rows = paper_table(results, config.metrics)
    write_json(config.output / "table.json", {"meta": results["meta"], "rows": rows})
    console.rule("all")
    console.print(on_screen(rows))
    if find_spec("matplotlib") is not None:
        console.print(f"report: {write_report(config.output)}", soft_wrap=True)
    console.print(f"table: {config.output / 'table.json'}", soft_wrap=True)
