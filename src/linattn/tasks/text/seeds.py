"""Random generators that depend on what is drawn, and not on what was drawn before."""

from hashlib import blake2b

import torch


def stream(purpose: str, *numbers: int) -> torch.Generator:
    """A generator whose draws depend on all arguments; other purposes or numbers give unrelated draws.

    Example:
        >>> first, second = stream("train", 0, 7), stream("train", 0, 7)
        >>> bool((torch.rand(3, generator=first) == torch.rand(3, generator=second)).all())
        True
    """
    text = f"{purpose} {' '.join(str(int(number)) for number in numbers)}"
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    return torch.Generator().manual_seed(seed)


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """A generator unchanged; for a number, the stream of that number."""
    return seed if isinstance(seed, torch.Generator) else stream("batch", seed)
