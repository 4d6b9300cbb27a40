"""Options of commands that train on images, in the same words everywhere."""

from typing import Annotated

import typer

ImageData = Annotated[
    str, typer.Option(help="digits, a folder of idx files (MNIST), an .npz file, a folder with train/ and test/.")
]
ImageSize = Annotated[int | None, typer.Option(help="Of images in folders.")]
WarmupEpochs = Annotated[float | None, typer.Option(help="Epochs in which the learning rate rises.")]
WeightDecay = Annotated[float | None, typer.Option(help="On weight matrices.")]
EmaDecay = Annotated[float | None, typer.Option(help="Average the weights with this decay; 0: do not.")]
Mixing = Annotated[float | None, typer.Option(help="Alpha; 0: off.")]
RandAugment = Annotated[str | None, typer.Option(help="Such as m9-n2; empty: off.")]
CropPadding = Annotated[int | None, typer.Option(help="Pixels an image may be shifted by.")]
Flip = Annotated[bool | None, typer.Option(help="Mirror half of the images.")]
ImageRecipe = Annotated[
    str, typer.Option(help="digits, small_images or deit.  [default: digits for digits, else small_images]")
]
Precision = Annotated[str, typer.Option(help="fp32 or bf16.  [default: bf16 on cuda]")]
Compile = Annotated[bool | None, typer.Option(help="Compile the blocks.  [default: on cuda]")]
Graphs = Annotated[bool | None, typer.Option(help="Replay steps as CUDA graphs.  [default: no]")]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time.  [default: one a core on a cpu, else 1]")]
