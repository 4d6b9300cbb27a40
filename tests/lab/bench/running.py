"""Runs a benchmark in a folder and reads what it wrote."""

from dataclasses import replace

from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen


def rows_of(config, folder, code=0):
    """The rows of a run, which must end with ``code``."""
    own = replace(config, output=folder)
    assert own.run(Screen(quiet=True)) == code
    return load_results(folder / "results.json")["rows"]


def statuses(rows, name):
    return {(row[name], row["status"]) for row in rows}
