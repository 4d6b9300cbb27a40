"""``linattn demo``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the chart and the JSON.")] = Path("runs/demo"),
) -> None:
    """A tour of a minute or two: the mechanisms, their forms agreeing, and linear against softmax attention."""
    from linattn.bench.chart import MissingChartLibraryError
    from linattn.bench.demo import demo as run

    try:
        code = run(output, Console())
    except MissingChartLibraryError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)
