"""The planes into which a timm model cuts images, for layers that are not passed them."""

import math
from typing import Any

from torch import nn


class Planes:
    """Planes by their number of tokens, as ``patch_embed`` makes them.

    A model with a fixed image size has one grid. One that takes images of any size (``dynamic_img_size=True``) is
    watched, since the same number of tokens may be 4 x 4 or 2 x 8. If tokens were dropped, there is no plane.
    """

    def __init__(self, patch_embed: Any = None, dynamic: bool = False) -> None:
        self.patch_embed, self.dynamic = patch_embed, dynamic
        self.seen: dict[int, tuple[int, int]] = {}

    def watch(self) -> None:
        """Start to record planes; only models for images of any size need it."""
        if self.dynamic:
            self.patch_embed.register_forward_pre_hook(self._note)

    def _note(self, patch_embed: Any, inputs: tuple[Any, ...]) -> None:
        height, width = patch_embed.dynamic_feat_size(inputs[0].shape[-2:])
        self.seen[height * width] = (height, width)

    def find(self, tokens: int) -> tuple[int, int] | None:
        if self.dynamic:
            return self.seen.get(tokens)
        grid = getattr(self.patch_embed, "grid_size", None)  # read anew each time: timm's set_input_size changes it
        return None if grid is None or math.prod(grid) != tokens else (int(grid[0]), int(grid[1]))


def find_tokens(model: nn.Module) -> tuple[int, Planes]:
    """The number of tokens before the plane, and the planes."""
    for module in model.modules():
        count = getattr(module, "num_prefix_tokens", None)
        if isinstance(count, int) and hasattr(module, "patch_embed"):
            return count, Planes(module.patch_embed, bool(getattr(module, "dynamic_img_size", False)))
    return 0, Planes()
