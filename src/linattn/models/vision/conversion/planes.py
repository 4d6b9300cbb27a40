"""Where tokens stand: the plane that a timm model has cut an image into, for layers that are not told."""

import math
from typing import Any

from torch import nn


class Planes:
    """Planes by their number of tokens, as ``patch_embed`` makes them.

    A model of one size says its grid. One that takes images of any size (``dynamic_img_size=True``) is watched: as many
    tokens may be 4 x 4 or 2 x 8. Where some tokens were dropped, no plane is left.
    """

    def __init__(self, patch_embed: Any = None, dynamic: bool = False) -> None:
        self.patch_embed, self.dynamic = patch_embed, dynamic
        self.seen: dict[int, tuple[int, int]] = {}

    def watch(self) -> None:
        """From now on; only models of any size need it."""
        if self.dynamic:
            self.patch_embed.register_forward_pre_hook(self._note)

    def _note(self, patch_embed: Any, inputs: tuple[Any, ...]) -> None:
        height, width = patch_embed.dynamic_feat_size(inputs[0].shape[-2:])
        self.seen[height * width] = (height, width)

    def find(self, tokens: int) -> tuple[int, int] | None:
        if self.dynamic:
            return self.seen.get(tokens)
        grid = getattr(self.patch_embed, "grid_size", None)  # as it is now: timm's set_input_size moves it
        return None if grid is None or math.prod(grid) != tokens else (int(grid[0]), int(grid[1]))


def find_tokens(model: nn.Module) -> tuple[int, Planes]:
    """Tokens before the plane, and the planes."""
    for module in model.modules():
        count = getattr(module, "num_prefix_tokens", None)
        if isinstance(count, int) and hasattr(module, "patch_embed"):
            return count, Planes(module.patch_embed, bool(getattr(module, "dynamic_img_size", False)))
    return 0, Planes()
