"""Sums of loss and hits that stay on the device."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


class Reading(NamedTuple):
    """Means over the images so far; ``finite_steps`` counts the steps in which the sum of losses was still finite."""

    loss: float
    accuracy: float
    finite_steps: int


class Meter:
    """Sums of loss and hits over an epoch, kept on the device: only ``read`` waits for it.

    Adding costs a few tiny kernels. A sum that is not finite stays so, and steps are counted while it is finite, so an
    occasional read is enough to find the step at which the loss diverged.

    Example:
        >>> meter = Meter(torch.device("cpu"))
        >>> logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]])
        >>> meter.add(torch.tensor(0.5), logits, torch.tensor([0, 1]))
        >>> meter.read()
        Reading(loss=0.5, accuracy=50.0, finite_steps=1)
    """

    def __init__(self, device: torch.device) -> None:
        # loss x images, hits, number of steps with a finite sum of losses
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.images = 0

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: ``loss`` is its mean; ``targets`` are labels ``(b,)`` or weights ``(b, classes)``."""
        self.add_batch(loss, logits, targets)
        self.count(len(targets))

    @torch.no_grad()
    def add_batch(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """The part of :meth:`add` on the device, which a CUDA graph can replay; :meth:`count` is the host's part."""
        classes = targets.argmax(-1) if targets.ndim == 2 else targets
        hits = (logits.argmax(-1) == classes).sum()
        self.add_sums(loss.detach().double() * len(targets), hits)

    @torch.no_grad()
    def add_sums(self, loss: Tensor, hits: Tensor) -> None:
        """Add sums over the images or tokens of a batch; call :meth:`count` with their number too."""
        self.sums[:2] += torch.stack([loss.detach().double(), hits.double()])
        self.sums[2] += self.sums[0].isfinite()

    def count(self, images: int) -> None:
        self.images += images

    def reset(self) -> None:
        """Reset all sums, in place, as CUDA graphs add to the same tensor."""
        self.sums.zero_()
        self.images = 0

    def read(self, accelerator: "Accelerator | None" = None) -> Reading:
        """Wait for the device and read. With an accelerator: over all processes, which must all call this."""
        rows = [self.as_row().tolist()] if accelerator is None else accelerator.gather(self.as_row()[None]).tolist()
        losses, hits, finite_steps, images = zip(*rows, strict=True)
        return Reading(sum(losses) / sum(images), 100 * sum(hits) / sum(images), int(min(finite_steps)))

    def as_row(self) -> Tensor:
        """The whole content, ``(4,)`` on the device, for ``restore``."""
        return torch.cat([self.sums, self.sums.new_full((1,), self.images)])

    def restore(self, row: Tensor) -> None:
        self.sums.copy_(row[:3])
        self.images = int(row[3])
