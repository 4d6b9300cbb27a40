"""Pictures of example images and of what a token attends to."""

import io
from typing import Any

from linattn.lab.pages.read import number

EDGE = 112  # least length of the longer side, in pixels
MARK, MARK_EDGE = (0, 229, 255), (0, 0, 0)


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
    weights = np.array([[number(value) or 0.0 for value in row] for row in heat]).clip(min=0)
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
