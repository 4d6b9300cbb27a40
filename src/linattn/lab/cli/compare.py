"""``linattn compare graph``."""

import typer

from linattn.lab.cli.graph import compare as graph

app = typer.Typer(help="Compare graph models.", no_args_is_help=True)
app.command(name="graph")(graph)


@app.callback()
def options() -> None:
    """Compare graph models."""
