"""Stage 1: each converted layer learns the output of the softmax attention it replaces.

The teacher runs without gradients and passes its own output on to the next layer, so layers learn independently of one
another. A layer's student runs, and its gradient is computed, at the moment the teacher reaches that layer: memory is
that of the teacher and of one layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from linattn.convert.layer.attention import Observation, Observer, linearized_layers, observing
from linattn.convert.training.loop import Batch, Batches, StageOptions, StageRun, call, in_eval, in_fp32, shared
from linattn.convert.training.losses import output_error, relative_error, row_divergence
from linattn.support.checkpoint import model_digest
from linattn.support.config import option
from linattn.support.progress import Report

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@dataclass(frozen=True, kw_only=True)
class TransferOptions(StageOptions):
    """Options for training the cores of converted layers.

    Example:
        >>> TransferOptions(loss="l1")
        Traceback (most recent call last):
        linattn.support.options.OptionError: loss: must be one of mse, cross_entropy, got 'l1'
    """

    loss: Literal["mse", "cross_entropy"] = option(
        "mse", "mse of the heads' outputs, or cross_entropy of attention rows: T^2 memory, no gate in the core."
    )
    # Each of these scales moves a whole head, and may have orders of magnitude to go.
    scale_factor: float = option(10.0, "Factor of the learning rate for scales learned as logarithms.", above=0)
    layers_per_round: int | None = option(
        None, "Layers that learn at the same time; the teacher stops after the last of them.", least=1,
        default_text="all",
    )  # fmt: skip


@dataclass(frozen=True)
class LayerCurve:
    """How a layer learned.

    Attributes:
        before, after: the share of the teacher's output that is missed, on held-out text if there is any; else the
            first loss and the mean of the last tenth of the losses.
        losses: training loss of each step.
    """

    layer: int
    before: float
    after: float
    losses: list[float]


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
        batches: see ``linattn.convert.training.loop``.
        folder: for this stage alone; finished rounds and checkpoints are written there. None: nothing is written.
        held_out: batches to measure errors on.
        progress: called with the steps done, the steps in all, and words.
        accelerator: of accelerate, for several processes that share the batches, or for another device than the
            model's.
    Raises:
        ResumeError: the folder holds another run; says what differs.
        UnstableError: a loss is not finite; says where.
    """
    options = options or TransferOptions()
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
            around = {"batches": batches, "folder": place, "accelerator": accelerator}
            report = _within(progress, index, len(rounds))
            curves += _Round(model, chosen, options, held_out, progress=report, **around).curves()
    return curves


def _within(progress: Report | None, index: int, rounds: int) -> Report | None:
    """Report the progress of one round as part of all rounds."""
    if progress is None or rounds == 1:
        return progress
    return lambda done, steps, words: progress(index * steps + done, rounds * steps, words)


class _Round(StageRun):
    """Trains some layers; each is a part with an optimiser of its own."""

    number = 0
    options: TransferOptions

    def __init__(
        self, model: nn.Module, numbers: Sequence[int], options: TransferOptions, held_out: Sequence[Batch], **more: Any
    ) -> None:
        layers = linearized_layers(model)
        self.layers = {number: layers[number] for number in numbers}
        super().__init__(model, {str(n): layer.core for n, layer in self.layers.items()}, options, **more)
        self.held_out = held_out
        self._newest: dict[int, Tensor] = {}
        self._forward: Callable[[Batch], None]

    def curves(self) -> list[LayerCurve]:
        """Train, or resume training; returns what each layer learned."""
        identity = {"layers": list(self.layers), "cores": model_digest(self.parts)}
        with _learning(self.parts), _stopping(self.model, self._learn, max(self.layers)) as self._forward:
            return [LayerCurve(**curve) for curve in self.go(identity)["curves"]]

    def begin(self) -> None:
        if self.held_out:
            self.memory = {"before": transfer_errors(self.model, self.held_out, list(self.layers))}

    def step(self) -> Tensor:
        self._newest.clear()
        self._forward(self.batch())
        return torch.stack([self._newest[number] for number in self.layers])

    def _learn(self, seen: Observation) -> None:
        """One layer's whole step while the teacher waits; only the new weights outlive the call."""
        layer, name = self.layers.get(seen.layer_idx), str(seen.layer_idx)
        if layer is None:
            return
        with torch.set_grad_enabled(name in self.optimizers):
            if self.options.loss == "mse":
                loss = unless_exact(relative_error(layer.core, seen), seen.output.dtype)
            else:
                loss = row_divergence(layer.core, seen, causal=layer.shape.causal)
        self._newest[seen.layer_idx] = loss.detach()
        if name in self.optimizers:
            loss.backward()
            self.update(name)

    def words(self, losses: Sequence[float]) -> str:
        worst = max(range(len(losses)), key=losses.__getitem__)
        return f"loss {sum(losses) / len(losses):.4f}, worst {losses[worst]:.4f} in layer {list(self.layers)[worst]}"

    def result(self) -> dict[str, Any]:
        after = transfer_errors(self.model, self.held_out, list(self.layers)) if self.held_out else {}
        before, curves = self.memory.get("before", {}), []
        for place, number in enumerate(self.layers):
            losses = [row[place] for row in self.losses()]
            last = losses[-max(1, len(losses) // 10) :]
            first = losses[0] if losses else float("nan")
            mean = sum(last) / len(last) if last else float("nan")
            curves.append(asdict(LayerCurve(number, before.get(number, first), after.get(number, mean), losses)))
        return {"curves": curves}


def unless_exact(loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Drop the gradient where only rounding is missed: an optimiser would follow noise away from the solution.

    Rounding is that of the teacher, in its dtype, and of sums in fp32. The device is not waited for.
    """
    floor = torch.finfo(dtype).eps ** 2 + (8 * torch.finfo(loss.dtype).eps) ** 2
    return torch.where(loss.detach() > floor, loss, loss * 0)


def transfer_errors(
    model: nn.Module, batches: Iterable[Batch], layers: Sequence[int] | None = None
) -> dict[int, float]:
    """For each layer, the share of the teacher's output that it misses: ``sum |error|^2 / sum |output|^2``."""
    cores = linearized_layers(model)
    chosen = list(cores if layers is None else layers)
    sums: dict[int, Tensor] = {}

    def observe(seen: Observation) -> None:
        if seen.layer_idx in chosen:
            with torch.no_grad():
                parts = torch.stack(output_error(cores[seen.layer_idx].core, seen)).double().sum(1)
            sums[seen.layer_idx] = sums.get(seen.layer_idx, 0) + parts

    device = next(model.parameters()).device
    with in_eval(model), _stopping(model, observe, max(chosen)) as run:
        for batch in batches:
            run(shared(batch, device, None))
    return {number: float(sums[number][0] / sums[number][1]) for number in chosen}


class PassedLayerError(Exception):
    """Raised after the last layer of interest, to skip the rest of the forward pass."""


@contextmanager
def _stopping(model: nn.Module, observe: Observer, last: int) -> Iterator[Callable[[Batch], None]]:
    """Yield a call of the model, without gradients, that shows layers to ``observe`` and ends after layer ``last``."""

    def look(seen: Observation) -> None:
        observe(seen)
        if seen.layer_idx == last:
            raise PassedLayerError

    def run(batch: Batch) -> None:
        try:
            with torch.no_grad():
                call(model, batch)
        except PassedLayerError:
            pass

    with observing(model, look):
        yield run


@contextmanager
def _learning(cores: nn.Module) -> Iterator[None]:
    """Let all parameters take gradients; on exit they are as they were."""
    before = [(parameter, parameter.requires_grad) for parameter in cores.parameters()]
    cores.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
            parameter.grad = None
