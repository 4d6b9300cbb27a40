"""The ``linattn`` command. Commands import what they need when they run, so that ``--help`` is quick."""

import typer

from linattn._version import __version__
from linattn.lab.cli.bench import bench
from linattn.lab.cli.bench_kernels import kernels
from linattn.lab.cli.bench_models import models
from linattn.lab.cli.compare import app as compare
from linattn.lab.cli.decoding import decoding
from linattn.lab.cli.doctor import doctor
from linattn.lab.cli.generate import generate
from linattn.lab.cli.inspect import inspect
from linattn.lab.cli.lab import app as lab
from linattn.lab.cli.linearize import linearize
from linattn.lab.cli.mechanisms import mechanisms
from linattn.lab.cli.memory import memory
from linattn.lab.cli.report import report
from linattn.lab.cli.throughput import throughput
from linattn.lab.cli.tour import tour
from linattn.lab.cli.train import app as train

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


app.add_typer(compare, name="compare")
app.add_typer(train, name="train")
app.add_typer(lab, name="lab")
for command in (generate, linearize, inspect, report, mechanisms, tour, doctor):
    app.command()(command)
for measure in (bench, kernels, models, memory, decoding, throughput):
    app.command()(measure)


if __name__ == "__main__":
    app()
