"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


COMPARE = "Compare mechanisms or models that are trained alike."
GRAPHS = "Graphs: the space that suits one, and what models cost as it grows."
LABORATORIES = "Experiments with known answers: a formula, a theorem or a bound stands beside every number."

COMMANDS: dict[str, Entry] = {
    "compare graph": Entry("linattn.lab.compare.graph:CompareGraphs", "Train models on one graph.", COMPARE),
    "graph search": Entry("linattn.lab.tasks.graph.search:SearchSpace", "The space that suits a graph.", GRAPHS),
    "graph scaling": Entry(
        "linattn.lab.compare.graph_scaling:GraphScaling", "Cost of a training step by number of nodes.", GRAPHS
    ),
    "lab icl": Entry(
        "linattn.lab.theory.icl.experiment:Icl", "In-context estimation beside closed forms.", LABORATORIES
    ),
}
