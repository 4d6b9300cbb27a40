"""``linattn lab``: experiments with known answers."""

import typer

from linattn.lab.cli.lab_entropy import entropy

app = typer.Typer(help="Laboratories: theory beside experiments that one can run again.", no_args_is_help=True)
for command in (entropy,):
    app.command()(command)
