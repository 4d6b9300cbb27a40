"""Options of commands that train on images, in the same words everywhere."""

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
    """How images are trained on, beside epochs, batch and learning rates, which each command explains for itself."""

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
        """Fields of ``TrainConfig``; None where the recipe decides."""
        return asdict(self)


def recipe_or_default(recipe: str, data: str) -> str:
    """What was asked for; else the one for the data, by its name alone."""
    return recipe or ("digits" if data == "digits" else "small_images")
