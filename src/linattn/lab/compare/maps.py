"""Attention maps on example images: one row for each image, one column for each mechanism."""

import io
from base64 import b64encode
from math import ceil
from pathlib import Path
from typing import Any

from linattn.lab.page.markup import Markup, element
from linattn.lab.page.plots import figure_of, settings
from linattn.lab.page.style import PAPER
from linattn.support.files import write_atomically

CELL, HEAD, GAP = 0.95, 0.3, 0.06  # inches
MOST_ACROSS = 9  # pictures side by side on a wide page
EDGE = 112  # least length of a picture's longer side, in pixels
MARK, MARK_EDGE = (0, 229, 255), (0, 0, 0)


def map_names(names: list[str], examples: dict[str, Any]) -> list[str]:
    """Mechanisms that have a map of some image, in the order of ``names``."""
    return [name for name in names if any((image.get("maps") or {}).get(name) for image in _images(examples))]


def save_map_png(names: list[str], examples: dict[str, Any], path: Path) -> None:
    """Save the grid as one picture."""
    columns, images = map_names(names, examples), _images(examples)
    with settings("maps"):
        width, height = CELL * (len(columns) + 1), CELL * len(images) + HEAD
        figure = figure_of(width, height, PAPER)
        for row, image in enumerate(images):
            for column, (title, pixels) in enumerate(_cells(columns, image)):
                x, y = CELL * column + GAP / 2, height - HEAD - CELL * (row + 1) + GAP / 2
                axes = figure.add_axes((x / width, y / height, (CELL - GAP) / width, (CELL - GAP) / height))
                axes.set_axis_off()
                if pixels is not None:
                    axes.imshow(pixels, interpolation="nearest")
                if row == 0:
                    axes.set_title(title, loc="center", fontsize=8.5, pad=3)
        write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160, metadata={"Software": None}))


def map_grid(names: list[str], examples: dict[str, Any]) -> Markup:
    """The same grid for the page: small pictures that wrap on a narrow screen, each with its name as text."""
    columns = map_names(names, examples)
    rows = []
    for image in _images(examples):
        label = str(image.get("label", ""))
        cells = []
        for title, pixels in _cells(columns, image):
            alt = f"Attention of the marked token with {title}, on an image of class {label}"
            alt = f"Image of class {label}, the chosen token marked" if title == "image" else alt
            shown = element("span", "no map", class_="absent") if pixels is None else _img(pixels, alt)
            caption = element("span", f"class {label}" if title == "image" else title, class_="name")
            cells.append(element("li", shown, caption))
        across = ceil(len(cells) / ceil(len(cells) / MOST_ACROSS))  # rows of nearly equal length
        rows.append(element("ul", *cells, class_="maps", style=f"--columns:{across}"))
    return element("div", *rows, class_="map-grid")


def _cells(columns: list[str], image: dict[str, Any]) -> list[tuple[str, Any]]:
    maps, token = image.get("maps") or {}, image.get("token")
    grid = next(((len(m), len(m[0])) for m in maps.values() if m), None)
    heats = [(name, heat_picture(image["pixels"], maps[name], token) if maps.get(name) else None) for name in columns]
    return [("image", picture(image["pixels"], token, grid)), *heats]


def _images(examples: dict[str, Any]) -> list[dict[str, Any]]:
    return [image for image in examples.get("images") or [] if image.get("pixels")]


def _img(pixels: Any, alt: str) -> Markup:
    source = f"data:image/png;base64,{b64encode(png(pixels)).decode()}"
    return element("img", src=source, alt=alt, width=str(pixels.shape[1]), height=str(pixels.shape[0]))


def picture(pixels: list[Any], token: list[int] | None, grid: tuple[int, int] | None) -> Any:
    """The image in colour ``(h, w, 3)``, enlarged by an integer factor, with a frame around the chosen token."""
    image = _enlarged(pixels)
    return _marked(image, token, grid) if token is not None and grid is not None else image


def heat_picture(pixels: list[Any], heat: list[list[float]], token: list[int] | None) -> Any:
    """The attention map over the image, in grey: one square per token, brighter for more weight, its maximum = 1.

    Pixels are ``(H, W)`` or ``(H, W, C)``, heat is ``(h, w)`` of any size. Without weight the image shows through.
    """
    import numpy as np
    from matplotlib import colormaps

    image = _enlarged(pixels).astype(float)
    grey = image @ (0.299, 0.587, 0.114)
    weights = np.array([[value or 0.0 for value in row] for row in heat]).clip(min=0)
    weights = weights / (weights.max() or 1.0)
    rows = np.arange(image.shape[0]) * weights.shape[0] // image.shape[0]
    columns = np.arange(image.shape[1]) * weights.shape[1] // image.shape[1]
    weights = weights[rows][:, columns]
    color = np.asarray(colormaps["inferno"](weights))[..., :3] * 255
    share = (0.55 + 0.35 * weights)[..., None]
    mixed = (share * color + (1 - share) * grey[..., None]).round().astype(np.uint8)
    return _marked(mixed, token, (len(heat), len(heat[0]))) if token is not None else mixed


def png(pixels: Any) -> bytes:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    metadata: Any = {"Software": None}  # otherwise the file would contain matplotlib's version
    imsave(buffer, pixels, format="png", metadata=metadata)
    return buffer.getvalue()


def _enlarged(pixels: list[Any]) -> Any:
    import numpy as np

    image = np.array(pixels, dtype=np.uint8)
    if image.ndim == 2:
        image = image[..., None]
    if image.shape[2] != 3:
        image = np.repeat(image[..., :1], 3, axis=2)
    factor = max(-(-EDGE // max(image.shape[:2])), 1)
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def _marked(image: Any, token: list[int], grid: tuple[int, int]) -> Any:
    """A bright frame with a dark one inside: visible on any background."""
    top, bottom = (image.shape[0] * (token[0] + step) // grid[0] for step in (0, 1))
    left, right = (image.shape[1] * (token[1] + step) // grid[1] for step in (0, 1))
    image = image.copy()
    for inset, color in ((0, MARK), (1, MARK), (2, MARK_EDGE)):
        y0, y1, x0, x1 = top + inset, bottom - 1 - inset, left + inset, right - 1 - inset
        if y1 < y0 or x1 < x0:
            break
        image[[y0, y1], x0 : x1 + 1] = color
        image[y0 : y1 + 1, [x0, x1]] = color
    return image
