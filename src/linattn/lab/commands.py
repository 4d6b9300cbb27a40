"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


COMPARE = "Train mechanisms or models alike, and compare them."
TRAIN = "Train one model: on images, on text, or on a task of sequences."
GRAPHS = "The space that suits a graph, and what models cost as it grows."
LABORATORIES = "Experiments with known answers: a formula, a theorem or a bound stands beside every number."

COMMANDS: dict[str, Entry] = {
    "compare": Entry("linattn.lab.compare.images:CompareImages", "Train mechanisms in one host, and compare them."),
    "compare text": Entry("linattn.lab.compare.text:CompareText", "The same on text or a task of sequences.", COMPARE),
    "compare conversion": Entry(
        "linattn.lab.compare.conversion:CompareConversion", "Convert a trained softmax model to each mechanism."
    ),
    "compare graph": Entry("linattn.lab.compare.graph:CompareGraphs", "Train models on one graph, and compare them."),
    "report": Entry("linattn.lab.compare.page:Report", "Draw the page of a comparison again."),
    "train images": Entry("linattn.lab.train.command:TrainImages", "Train one mechanism on images.", TRAIN),
    "train lm": Entry("linattn.lab.train.command:TrainLm", "Train a language model on a text.", TRAIN),
    "train mlm": Entry("linattn.lab.train.command:TrainMlm", "Train an encoder on a text.", TRAIN),
    "train task": Entry("linattn.lab.train.command:TrainTask", "Train on a task of sequences.", TRAIN),
    "generate": Entry("linattn.lab.generate:Generate", "Go on from a prompt with a language model."),
    "linearize": Entry("linattn.lab.convert.linearize:Linearize", "Replace a pretrained model's softmax attention."),
    "inspect": Entry("linattn.lab.convert.inspect:Inspect", "Look at a pretrained model's attention beforehand."),
    "graph search": Entry("linattn.lab.tasks.graph.search:SearchSpace", "The space that suits a graph.", GRAPHS),
    "graph scaling": Entry("linattn.lab.compare.graph_scaling:GraphScaling", "Cost of a step by number of nodes."),
    "bench": Entry("linattn.lab.bench.attention:Attention", "Time and memory of linear attention beside softmax."),
    "kernels": Entry("linattn.lab.bench.kernels:Kernels", "Time of GPU kernels beside rivals and the floor."),
    "models": Entry("linattn.lab.bench.models:Models", "Training steps of whole models beside the same on softmax."),
    "memory": Entry("linattn.lab.bench.blocks:Blocks", "Memory and time of a transformer block by number of tokens."),
    "decoding": Entry("linattn.lab.bench.decoding:Decoding", "Time and memory of a decoded token by context."),
    "throughput": Entry("linattn.lab.bench.models:Throughput", "Training tokens a second by sequence length."),
    "lab icl": Entry("linattn.lab.theory.icl:Icl", "In-context estimation and closed forms.", LABORATORIES),
    "lab synth": Entry("linattn.lab.theory.synth:Synth", "Controlled tasks of Physics of Language Models."),
    "lab entropy": Entry("linattn.lab.theory.entropy:Entropy", "Entropy and the norm of queries."),
    "lab dof": Entry("linattn.lab.theory.dof:Dof", "Random features of attention, and a bound."),
    "tour": Entry("linattn.lab.bench.tour:Tour", "The mechanisms, their forms agreeing, cuts anywhere."),
    "mechanisms": Entry("linattn.lab.bench.tour:Mechanisms", "Every registered mechanism and what it can do."),
    "doctor": Entry("linattn.lab.bench.tour:Doctor", "Versions, devices, extras, and what auto would choose here."),
}
