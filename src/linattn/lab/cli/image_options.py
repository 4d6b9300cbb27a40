"""Options that all commands which train on images have in common."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

ImageData = Annotated[
    str, typer.Option(help="digits, a folder of idx files (MNIST), an .npz file, a folder with train/ and test/.")
]
ImageSize = Annotated[int | None, typer.Option(help="Pixels that images in folders are brought to, on a side.")]
ImageRecipe = Annotated[
    str, typer.Option(help="digits, small_images or deit.", show_default="digits for digits, else small_images")
]


@dataclass(kw_only=True)
class ImageOptions:
    """Options of training on images, except epochs, batch size and learning rates, which each command has itself."""

    warmup_epochs: Annotated[float | None, typer.Option(help="Epochs in which the learning rate rises.")] = None
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay, on matrices alone.")] = None
    clip_norm: Annotated[
        float | None, typer.Option(help="Gradients longer than this are scaled down; 0: not clipped.")
    ] = None
    label_smoothing: Annotated[float | None, typer.Option(help="Share of a target spread over all classes.")] = None
    energy_loss: Annotated[
        float | None,
        typer.Option(help="Weight of a second loss, the share of energy that mirror cuts off; 0: none."),
    ] = None
    ema_decay: Annotated[float | None, typer.Option(help="Average the weights with this decay; 0: do not.")] = None
    mixup: Annotated[float | None, typer.Option(help="Alpha of mixup; 0: off.")] = None
    cutmix: Annotated[float | None, typer.Option(help="Alpha of cutmix; 0: off.")] = None
    rand_augment: Annotated[str | None, typer.Option(help="RandAugment, such as m9-n2; empty: off.")] = None
    erasing: Annotated[float | None, typer.Option(help="Probability to erase a part of an image.")] = None
    crop_padding: Annotated[int | None, typer.Option(help="Pixels an image may be shifted by.")] = None
    flip: Annotated[bool | None, typer.Option(help="Mirror half of the images.")] = None

    def changes(self) -> dict[str, Any]:
        """The options as fields of ``TrainConfig``; None: as in the recipe."""
        return asdict(self)


def recipe_or_default(recipe: str, data: str) -> str:
    """The recipe that was given; else the default for the data, judged by its name alone."""
    return recipe or ("digits" if data == "digits" else "small_images")
