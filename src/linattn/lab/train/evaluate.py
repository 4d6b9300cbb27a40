"""Loss and accuracy on the test split."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.train.loss import training_loss
from linattn.lab.train.meter import Meter, Reading

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accelerator: "Accelerator") -> Reading:
    """Mean cross-entropy and accuracy (percent) over ``batches``, in the accelerator's precision; sets ``eval`` mode.

    Each process evaluates its share of the images; the result is over all processes.
    """
    model.eval()
    meter = Meter(accelerator.device)
    full = 0
    for images, targets in batches:
        full = max(full, len(images))
        with accelerator.autocast():
            # The last batch may be smaller: it is filled up, so that compiled code sees only one shape.
            logits = model(F.pad(images, (0, 0, 0, 0, 0, 0, 0, full - len(images))))[: len(images)]
        meter.add(training_loss(logits, targets, label_smoothing=0.0), logits, targets)
    return meter.read(accelerator)
