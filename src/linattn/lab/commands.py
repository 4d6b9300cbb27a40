"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


TRAIN = "Train one model: on images, on text, or on a task of sequences."
COMPARE = "Compare mechanisms or models that are trained alike."
LABORATORIES = "Experiments with known answers: a formula, a theorem or a bound stands beside every number."

COMMANDS: dict[str, Entry] = {
    "compare text": Entry("linattn.lab.compare.text:CompareText", "Train mechanisms on text or a task.", COMPARE),
    "generate": Entry("linattn.lab.generate:Generate", "Go on from a prompt with a language model."),
    "inspect": Entry("linattn.lab.convert.inspect:Inspect", "Look at a pretrained model's attention beforehand."),
    "lab dof": Entry("linattn.lab.theory.dof:Dof", "Random features of attention, and a bound.", LABORATORIES),
    "lab icl": Entry(
        "linattn.lab.theory.icl.experiment:Icl", "In-context estimation beside closed forms.", LABORATORIES
    ),
    "lab synth": Entry(
        "linattn.lab.theory.synth:Synth", "Controlled tasks of Physics of Language Models.", LABORATORIES
    ),
    "linearize": Entry("linattn.lab.convert.linearize:Linearize", "Replace a pretrained model's softmax attention."),
    "train lm": Entry("linattn.lab.train.text.command:TrainLm", "Train a language model on a text.", TRAIN),
    "train mlm": Entry("linattn.lab.train.text.command:TrainMlm", "Train an encoder on a text.", TRAIN),
    "train task": Entry("linattn.lab.train.text.command:TrainTask", "Train on a task of sequences.", TRAIN),
}
