"""What a task measures, on its test sequences."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from linattn.tasks.text import Sequences
from linattn.train.text.network import TextNetwork

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@torch.no_grad()
def evaluate(network: TextNetwork, batches: Iterable[Sequences], accelerator: "Accelerator") -> dict[str, float]:
    """``task.metrics`` of the sums over ``batches``, in the accelerator's precision; leaves ``eval`` mode on.

    Each process brings its share of the batches, all of the same kind; the result is that of all.
    """
    network.eval()
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        with accelerator.autocast():
            logits = network.logits(batch)
        for name, value in network.task.score(logits, batch).items():
            sums[name] = sums[name] + value if name in sums else value
    if accelerator.num_processes > 1:
        sums = _over_processes(sums, accelerator)
    return network.task.metrics({name: value.item() for name, value in sums.items()})


def _over_processes(sums: dict[str, torch.Tensor], accelerator: "Accelerator") -> dict[str, torch.Tensor]:
    """A process without a batch of its own has no sums: it is told their names by the others."""
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    found: dict[str, torch.Tensor] = {}
    for own in gather_object([{name: value.item() for name, value in sums.items()}]):
        for name, value in own.items():
            found[name] = found.get(name, torch.zeros((), dtype=torch.float64)) + value
    return found
