"""One round of attention transfer: some layers of a model learn their softmax attention while the teacher runs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.layer.attention import LinearizedAttention, Observation, linearized_layers, observing
from linattn.convert.training.loop import StageRun, groups_with_scales
from linattn.convert.training.losses import output_error, relative_error, row_divergence
from linattn.convert.training.modes import in_eval, learning
from linattn.convert.training.setting import Batch, Setting, call, shared
from linattn.convert.transfer.options import LayerCurve, TransferOptions
from linattn.support.checkpoint import model_digest


class Round(StageRun):
    """Trains some layers; each is a part with an optimiser of its own."""

    options: TransferOptions

    def __init__(
        self,
        model: nn.Module,
        layers: dict[int, LinearizedAttention],
        options: TransferOptions,
        setting: Setting,
        held_out: Sequence[Batch],
    ) -> None:
        super().__init__({str(number): layer.core for number, layer in layers.items()}, options, setting, 0)
        self.model, self.layers, self.held_out = model, layers, held_out
        self.before: dict[int, float] = {}
        self._losses: dict[int, Tensor] = {}
        self._forward: Callable[[Batch], None]

    def curves(self) -> list[LayerCurve]:
        """Train, or resume training; returns what each layer learned."""
        identity = {"layers": list(self.layers), "cores": model_digest(self.parts)}
        with learning(self.parts), stopping(self.model, self._learn, max(self.layers)) as self._forward:
            return [LayerCurve(**curve) for curve in self.go(identity)["curves"]]

    def groups(self, part: nn.Module) -> list[dict[str, Any]]:
        return groups_with_scales(part.named_parameters(), self.options.scale_factor)

    def begin(self) -> None:
        if self.held_out:
            self.before = transfer_errors(self.model, self.held_out, list(self.layers))

    def memory(self) -> dict[str, Any]:
        return {"before": self.before}

    def remember(self, memory: dict[str, Any]) -> None:
        self.before = memory["before"]

    def step(self) -> Tensor:
        self._losses.clear()
        self._forward(self.setting.batch(self.done))
        return torch.stack([self._losses[number] for number in self.layers])

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
        self._losses[seen.layer_idx] = loss.detach()
        if name in self.optimizers:
            loss.backward()
            self.update(name)

    def words(self, losses: Sequence[float]) -> str:
        worst = max(range(len(losses)), key=losses.__getitem__)
        mean = sum(losses) / len(losses)
        return f"loss {mean:.4f}, worst {losses[worst]:.4f} in layer {self.readings.what[worst]}"

    def result(self) -> dict[str, Any]:
        after = transfer_errors(self.model, self.held_out, list(self.layers)) if self.held_out else {}
        curves = []
        for number, losses in zip(self.layers, self.readings.columns(), strict=True):
            last = losses[-max(1, len(losses) // 10) :]
            first = losses[0] if losses else float("nan")
            mean = sum(last) / len(last) if last else float("nan")
            curves.append(LayerCurve(number, self.before.get(number, first), after.get(number, mean), losses))
        return {"curves": [curve.as_dict() for curve in curves]}


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
    chosen = list(linearized_layers(model) if layers is None else layers)
    sums: dict[int, Tensor] = {}
    cores = linearized_layers(model)

    def observe(seen: Observation) -> None:
        if seen.layer_idx in chosen:
            with torch.no_grad():
                parts = torch.stack(output_error(cores[seen.layer_idx].core, seen)).double().sum(1)
            sums[seen.layer_idx] = sums.get(seen.layer_idx, 0) + parts

    device = next(model.parameters()).device
    with in_eval(model), stopping(model, observe, max(chosen)) as run:
        for batch in batches:
            run(shared(batch, device, None))
    return {number: float(sums[number][0] / sums[number][1]) for number in chosen}


class PassedLayerError(Exception):
    """Raised after the last layer of interest, to skip the rest of the forward pass."""


@contextmanager
def stopping(model: nn.Module, observe: Any, last: int) -> Iterator[Any]:
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
