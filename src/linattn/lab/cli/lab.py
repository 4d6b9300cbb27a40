"""``linattn lab``: experiments with known answers."""

import typer

from linattn.lab.cli.lab_dof import dof
from linattn.lab.cli.lab_entropy import entropy
from linattn.lab.cli.lab_synth import synth

app = typer.Typer(help="Laboratories: theory beside experiments that one can run again.", no_args_is_help=True)
for command in (synth, entropy, dof):
    app.command()(command)
