"""The progress bar of a run: epoch, loss, accuracy, time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from linattn.lab.train.records import EpochRecord
from linattn.support.progress import step_bar


class TrainBar:
    """A progress bar; its methods are passed to ``train`` as ``on_step`` and ``on_epoch``."""

    def __init__(self, progress: Progress, task: TaskID, epochs: int, steps_per_epoch: int) -> None:
        self._progress, self._task = progress, task
        self._epochs, self._steps = epochs, steps_per_epoch
        self._tested = ""

    def on_step(self, epoch: int, step: int, loss: float, accuracy: float) -> None:
        text = f"epoch {epoch + 1}/{self._epochs}  loss {loss:.3f}  train {accuracy:.1f} %{self._tested}"
        self._progress.update(self._task, completed=epoch * self._steps + step, description=text)

    def on_epoch(self, record: EpochRecord) -> None:
        self._tested = f"  test {record.top1:.1f} %"


@contextmanager
def train_bar(
    epochs: int, steps_per_epoch: int, console: Console | None = None, *, hidden: bool = False
) -> Iterator[TrainBar]:
    """A progress bar on stderr, so that a command's output can be piped; it disappears at the end.

    A resumed run counts its earlier epochs as done from its first report on.
    """
    with step_bar(epochs * steps_per_epoch, console, hidden=hidden) as (progress, task):
        yield TrainBar(progress, task, epochs, steps_per_epoch)
