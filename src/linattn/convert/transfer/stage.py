"""Stage 1: each converted layer learns the output of the softmax attention it replaces.

The teacher runs without gradients and passes its own output on to the next layer, so layers learn independently of one
another. A layer's student runs, and its gradient is computed, at the moment the teacher reaches that layer: memory is
that of the teacher and of one layer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from linattn.convert.layer.attention import linearized_layers
from linattn.convert.training.modes import in_eval
from linattn.convert.training.setting import Batch, Batches, Report, Setting, in_fp32
from linattn.convert.transfer.options import LayerCurve, TransferOptions
from linattn.convert.transfer.round import Round

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


def transfer(
    model: nn.Module,
    batches: Batches,
    options: TransferOptions | None = None,
    folder: Path | None = None,
    *,
    held_out: Sequence[Batch] = (),
    progress: Report | None = None,
    accelerator: "Accelerator | None" = None,
) -> list[LayerCurve]:
    """Train the cores of a converted model, layer by layer, against its own softmax attention.

    Nothing else in the model changes. A step depends on the weights, the optimiser and its number alone: a run that was
    stopped and started again, from the same model, ends in the same weights.

    Args:
        model: a model converted by ``linattn.convert.convert``; its cores are trained, and stay, in fp32.
        batches: see ``linattn.convert.training.setting``.
        folder: for this stage alone; finished rounds and checkpoints are written there. None: nothing is written.
        held_out: batches to measure errors on.
        progress: called with the steps done, the steps in all, and words.
        accelerator: of ``linattn.lab.train.accelerator``, for several processes that share the batches, or for another
            device than the model's.
    Raises:
        OptionError: options are invalid; nothing was done.
        ResumeError: the folder holds another run; says what differs.
        UnstableError: a loss is not finite; says where.
    """
    options = options or TransferOptions()
    options.check()
    layers = linearized_layers(model)
    if not layers:
        raise ValueError("the model has no converted layers: call linattn.convert.convert.convert first")
    for layer in layers.values():
        in_fp32(layer.core)
    numbers = list(layers)
    size = options.layers_per_round or len(numbers)
    rounds = [numbers[first : first + size] for first in range(0, len(numbers), size)]
    curves: list[LayerCurve] = []
    with in_eval(model):
        for index, chosen in enumerate(rounds):
            place = None if folder is None else Path(folder) / f"round-{index:03d}"
            words = f"layers {chosen[0]}-{chosen[-1]} of {len(numbers)}"
            setting = Setting.of(model, batches, place, accelerator, _within(progress, index, len(rounds), words))
            curves += Round(model, {number: layers[number] for number in chosen}, options, setting, held_out).curves()
    return curves


def _within(progress: Report | None, index: int, rounds: int, words: str) -> Report | None:
    """Report the progress of one round as part of all rounds."""
    if progress is None:
        return None
    return lambda done, steps, said: progress(index * steps + done, rounds * steps, f"{words}  {said}")
