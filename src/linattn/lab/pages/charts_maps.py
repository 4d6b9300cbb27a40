"""Attention maps on example images: one row per image, one column per mechanism."""

from base64 import b64encode
from math import ceil
from pathlib import Path
from typing import Any

from linattn.lab.page.markup import Markup, element
from linattn.lab.page.plots import figure_of, settings
from linattn.lab.page.style import PAPER
from linattn.lab.pages.overlay import heat_picture, picture, png
from linattn.support.files import write_atomically

CELL, HEAD, GAP = 0.95, 0.3, 0.06  # inches
MOST_ACROSS = 9  # pictures side by side on a wide page


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
