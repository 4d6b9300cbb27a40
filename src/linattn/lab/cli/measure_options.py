"""Options that all commands which measure language models have in common."""

from pathlib import Path
from typing import Annotated

import typer

Seconds = Annotated[float, typer.Option(help="Begin nothing after that; --resume goes on.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the rows of the file that is there, measure what it lacks.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A tiny model: shows that everything runs.")]
Chart = Annotated[bool, typer.Option(help="Draw a PNG beside the JSON (needs the extra report).")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the results.", show_default="results/<device>, with --quick runs/bench")
]
Name = Annotated[str, typer.Option(help="Name of the files.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and text.")]
