"""Options that the laboratories have in common, and where their results go."""

from pathlib import Path
from typing import Annotated

import typer

Chart = Annotated[bool, typer.Option(help="Draw PNGs and write a page beside the JSON (extra report).")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the results.", show_default="results/<device>, with --quick runs/lab")
]
Name = Annotated[str, typer.Option(help="Name of the files.")]


def lab_folder(output: Path | None, device: str, *, quick: bool) -> Path:
    """What was asked for; else beside the other results of the device, or out of their way."""
    import torch

    from linattn.support.machine import device_folder

    return output or (Path("runs/lab") if quick else Path("results") / device_folder(torch.device(device)))
