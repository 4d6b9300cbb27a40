"""``linattn compare``: tasks of sequences, and graphs."""

import typer

from linattn.lab.cli.compare_text import text
from linattn.lab.cli.graph import compare as graph
from linattn.lab.cli.options import DefaultGroup


class Compare(DefaultGroup):
    """A group that runs ``text`` if no command is named."""

    default = "text"


app = typer.Typer(cls=Compare, help="Compare language models and graph models.", no_args_is_help=False)
app.command()(text)
app.command(name="graph")(graph)
