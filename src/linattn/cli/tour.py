"""``linattn tour``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def tour(
    output: Annotated[Path, typer.Option(help="Folder for the chart and the JSON.")] = Path("runs/tour"),
) -> None:
    """A tour of a minute or two: the mechanisms, their forms agreeing, and linear against softmax attention."""
    from linattn.bench.tour import tour as run
    from linattn.support.extras import MissingExtraError

    try:
        code = run(output, Console())
    except MissingExtraError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)
