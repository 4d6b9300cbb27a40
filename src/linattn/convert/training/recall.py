"""Sequences that end with passages of their own earlier text, which only recall can predict.

Ordinary text rarely needs a token from far back, so a converted layer hardly learns to keep sharp matches sharp.
Repeated passages are self-supervision on any text: there is no template, question or mark, and nothing that resembles
how retrieval is measured.
"""

import torch
from torch import Tensor

# A passage's first tokens only say where it comes from; the shortest has several times as many that can be recalled.
# The longest still leaves room for a few passages from different places at the end of a sequence of 1,024 tokens.
SHORTEST, LONGEST = 16, 64
# One token in four is repeated: three quarters remain as written, far before most of the repetitions.
REPEATED_PART = 4
LEAST_LENGTH = REPEATED_PART * SHORTEST  # of a sequence, so that one passage fits at its end


def ending_in_passages(ids: Tensor, draw: torch.Generator) -> Tensor:
    """Replace the last quarter of a sequence ``(T,)`` by passages from random places before it.

    A sequence shorter than ``LEAST_LENGTH`` is returned unchanged.

    Example:
        >>> ids = ending_in_passages(torch.arange(64), torch.Generator().manual_seed(0))
        >>> ids[:48].tolist() == list(range(48)), (ids[48:] - ids[48]).tolist() == list(range(16))
        (True, True)
    """
    if len(ids) < LEAST_LENGTH:
        return ids
    kept = len(ids) - len(ids) // REPEATED_PART
    parts, left = [ids[:kept]], len(ids) - kept
    while left > 0:
        size = _passage_size(left, draw)
        first = int(torch.randint(kept - size + 1, (), generator=draw))
        parts.append(ids[first : first + size])
        left -= size
    return torch.cat(parts)


def _passage_size(left: int, draw: torch.Generator) -> int:
    """A random size from ``SHORTEST`` to ``LONGEST``, chosen so that the rest of the ``left`` tokens is no shorter."""
    size = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=draw))
    if left - size >= SHORTEST:
        return size
    return left if left <= LONGEST else left - SHORTEST
