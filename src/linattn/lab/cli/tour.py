"""``linattn tour``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import option_errors


def tour(
    output: Annotated[Path, typer.Option(help="Folder for the chart and the JSON.")] = Path("runs/tour"),
) -> None:
    """A tour of a minute or two: the mechanisms, their forms agreeing, and linear against softmax attention."""
    from linattn.lab.bench.tour import tour as run

    with option_errors():
        code = run(output, Console())
    raise typer.Exit(code)
