"""Small parts that adapters share: finding blocks, splitting and joining heads."""

from collections.abc import Iterator

from torch import Tensor, nn


def blocks(model: nn.Module, *class_names: str) -> Iterator[tuple[str, nn.Module]]:
    """The model's blocks in order, each as (dotted path, module).

    Blocks are found by the name of their class, or of one that it inherits, before and after their attention was
    replaced.
    """
    for name, module in model.named_modules():
        if any(cls.__name__ in class_names for cls in type(module).__mro__):
            yield name, module


def inside(path: str, *parts: str) -> str:
    """Dotted path of a part inside the module at ``path``; the model itself has the empty path."""
    return ".".join(filter(None, (path, *parts)))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``(B, T, H D) -> (B, H, T, D)``."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """``(B, H, T, D) -> (B, T, H D)``."""
    return x.transpose(1, 2).flatten(2)
