"""The ``linattn`` command. Commands import what they need when they run, so that ``--help`` is quick."""

import typer

from linattn._version import __version__
from linattn.lab.cli.graph import app as graph

app = typer.Typer(
    help="Linear attention for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"linattn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Linear attention for PyTorch."""


app.add_typer(graph, name="graph")


if __name__ == "__main__":
    app()
