"""Options that the ``lab`` commands have in common, and the folder of their results."""

from pathlib import Path
from typing import Annotated

import typer

Chart = Annotated[bool, typer.Option(help="Draw PNGs and write a page beside the JSON (extra report).")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the results.", show_default="results/<device>, with --quick runs/lab")
]
Name = Annotated[str, typer.Option(help="Name of the files.")]


def lab_folder(output: Path | None, device: str, *, quick: bool) -> Path:
    """The folder that was given; else that of the device's results, or with ``quick`` one apart from them."""
    import torch

    from linattn.support.machine import device_folder

    return output or (Path("runs/lab") if quick else Path("results") / device_folder(torch.device(device)))
