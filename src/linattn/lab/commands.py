"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


LABORATORIES = "Experiments with known answers: a formula, a theorem or a bound stands beside every number."

COMMANDS: dict[str, Entry] = {
    "bench": Entry("linattn.lab.bench.attention:Attention", "Time and memory of linear attention beside softmax."),
    "kernels": Entry("linattn.lab.bench.kernels:Kernels", "Time of GPU kernels beside rivals and the floor."),
    "models": Entry("linattn.lab.bench.models:Models", "Training steps of whole models beside the same on softmax."),
    "memory": Entry("linattn.lab.bench.blocks:Blocks", "Memory and time of a transformer block by number of tokens."),
    "decoding": Entry("linattn.lab.bench.decoding:Decoding", "Time and memory of a decoded token by context."),
    "throughput": Entry("linattn.lab.bench.throughput:Throughput", "Training tokens a second by sequence length."),
    "tour": Entry("linattn.lab.bench.tour:Tour", "The mechanisms, their forms agreeing, linear against softmax."),
    "mechanisms": Entry("linattn.lab.bench.tour:Mechanisms", "Every registered mechanism and what it can do."),
    "doctor": Entry("linattn.lab.bench.doctor:Doctor", "Versions, devices, extras, and what auto would choose here."),
    "lab icl": Entry(
        "linattn.lab.theory.icl.experiment:Icl", "In-context estimation beside closed forms.", LABORATORIES
    ),
}
