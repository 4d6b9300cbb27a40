"""The commands: their names, the configs that are run, and a line on each."""

from typing import NamedTuple


class Entry(NamedTuple):
    """``config``: the module and the class; ``group``: the line of the command above, where there is one."""

    config: str
    summary: str
    group: str = ""


LAB = "Laboratories: theory beside experiments that one can run again."
COMMANDS: dict[str, Entry] = {
    "linearize": Entry("linattn.lab.convert.linearize:Linearize", "Replace a pretrained model's softmax attention."),
    "lab dof": Entry(
        "linattn.lab.theory.dof:Dof", "How well random features approximate softmax attention, and a bound.", LAB
    ),
    "inspect": Entry("linattn.lab.convert.inspect:Inspect", "Look at a pretrained model's attention beforehand."),
}
