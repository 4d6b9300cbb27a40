"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


LABORATORIES = "Experiments with known answers: a formula, a theorem or a bound stands beside every number."

COMMANDS: dict[str, Entry] = {
    "lab icl": Entry(
        "linattn.lab.theory.icl.experiment:Icl", "In-context estimation beside closed forms.", LABORATORIES
    ),
}
