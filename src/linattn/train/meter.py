"""Loss and hits, summed where they are computed."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


class Reading(NamedTuple):
    """Means over the images so far; ``finite_steps`` counts the steps before the sum of losses was no number."""

    loss: float
    accuracy: float
    finite_steps: int


class Meter:
    """Sums over an epoch that stay on the device: only ``read`` waits for it.

    Adding costs a few tiny kernels. A sum that is not finite stays so, which makes one look now and then enough to
    find the very step that broke it.

    Example:
        >>> meter = Meter(torch.device("cpu"))
        >>> logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]])
        >>> meter.add(torch.tensor(0.5), logits, torch.tensor([0, 1]))
        >>> meter.read()
        Reading(loss=0.5, accuracy=50.0, finite_steps=1)
    """

    def __init__(self, device: torch.device) -> None:
        # loss x images, hits, steps while the sum of losses was finite
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.images = 0

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """``loss`` is the mean of a batch; ``targets`` are classes ``(b,)`` or shares ``(b, classes)``."""
        self.add_batch(loss, logits, targets)
        self.count(len(targets))

    @torch.no_grad()
    def add_batch(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """:meth:`add` as far as the device goes: what a CUDA graph replays; :meth:`count` is left to the host."""
        classes = targets.argmax(-1) if targets.ndim == 2 else targets
        hits = (logits.argmax(-1) == classes).sum()
        self.add_sums(loss.detach().double() * len(targets), hits)

    @torch.no_grad()
    def add_sums(self, loss: Tensor, hits: Tensor) -> None:
        """Sums over the images, or tokens, of a batch; :meth:`count` them too."""
        self.sums[:2] += torch.stack([loss.detach().double(), hits.double()])
        self.sums[2] += self.sums[0].isfinite()

    def count(self, images: int) -> None:
        self.images += images

    def reset(self) -> None:
        """Begin anew, in the same tensor: a CUDA graph adds to it."""
        self.sums.zero_()
        self.images = 0

    def read(self, accelerator: "Accelerator | None" = None) -> Reading:
        """Waits for the device. With an accelerator: over all processes, which must all be here."""
        rows = [self.as_row().tolist()] if accelerator is None else accelerator.gather(self.as_row()[None]).tolist()
        losses, hits, finite_steps, images = zip(*rows, strict=True)
        return Reading(sum(losses) / sum(images), 100 * sum(hits) / sum(images), int(min(finite_steps)))

    def as_row(self) -> Tensor:
        """All there is, ``(4,)`` on the device; ``restore`` takes it back."""
        return torch.cat([self.sums, self.sums.new_full((1,), self.images)])

    def restore(self, row: Tensor) -> None:
        self.sums.copy_(row[:3])
        self.images = int(row[3])
