"""Evaluation on the test sequences of a task."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from linattn.lab.tasks.text import Sequences
from linattn.lab.train.text.network import TextNetwork

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@torch.no_grad()
def evaluate(network: TextNetwork, batches: Iterable[Sequences], accelerator: "Accelerator") -> dict[str, float]:
    """The metrics of the network's task over ``batches``, in the accelerator's precision; sets ``eval`` mode.

    Each process evaluates its share of the batches, all of the same kind; the result is over all processes.
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
    """Add up sums over processes; a process without batches has none and gets their names from the others."""
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    found: dict[str, torch.Tensor] = {}
    for own in gather_object([{name: value.item() for name, value in sums.items()}]):
        for name, value in own.items():
            found[name] = found.get(name, torch.zeros((), dtype=torch.float64)) + value
    return found
