"""``linattn report``."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a comparison: results.json, and examples.json if any.")],
) -> None:
    """Draw the charts and write the page of a comparison again, from its results.

    Exit code: 0 all right, 2 a folder without results or a package that is missing.
    """
    from linattn.lab.pages.write import write_report
    from linattn.support.extras import MissingExtraError
    from linattn.support.options import OptionError

    try:
        path = write_report(folder)
    except OptionError as error:
        raise typer.BadParameter(error.message, param_hint="FOLDER") from error
    except MissingExtraError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"page    {path}\ncharts  {folder / 'charts'}")
