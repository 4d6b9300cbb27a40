"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


TRAIN = "Train one model: on images, on text, or on a task of sequences."
COMPARE = "Compare mechanisms or models that are trained alike."
LAB = "Laboratories: theory beside experiments that one can run again."
COMMANDS: dict[str, Entry] = {
    "train lm": Entry("linattn.lab.train.text.command:TrainLm", "Train a language model on a text.", TRAIN),
    "train mlm": Entry("linattn.lab.train.text.command:TrainMlm", "Train an encoder on a text.", TRAIN),
    "train task": Entry("linattn.lab.train.text.command:TrainTask", "Train on a task of sequences.", TRAIN),
    "compare text": Entry("linattn.lab.compare.text:CompareText", "Train mechanisms on text or a task.", COMPARE),
    "lab synth": Entry("linattn.lab.theory.synth:Synth", "Controlled tasks of Physics of Language Models.", LAB),
    "generate": Entry("linattn.lab.generate:Generate", "Go on from a prompt with a language model."),
}
