"""Stage 1: each converted layer learns the output of the softmax attention it replaces.

The teacher runs without gradients and passes its own output on to the next layer, so layers learn independently of one
another. A layer's student runs, and its gradient is computed, at the moment the teacher reaches that layer: memory is
that of the teacher and of one layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from linattn.convert.convert import Observation, Observer, linearized_layers, observing
from linattn.convert.training.loop import Batch, Batches, StageOptions, StageRun, call, in_fp32, in_stage, quiet, shared
from linattn.ops.shared.call import compute_dtype
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
        folder: for this stage alone; checkpoints and the result are written there. None: nothing is written.
        held_out: batches to measure errors on.
        progress: called with the steps done, the steps in all, and words.
        accelerator: of accelerate, for several processes that share the batches, or for another device than the
            model's.
    Raises:
        ResumeError: the folder holds another run; says what differs.
        UnstableError: a loss is not finite; says where.
    """
    around = {"batches": batches, "folder": folder, "progress": progress, "accelerator": accelerator}
    with in_stage(model):
        for layer in linearized_layers(model).values():
            in_fp32(layer.core).requires_grad_(True)
        run = _Transfer(model, options or TransferOptions(), held_out, **around)
        with _stopping(model, run.learn) as run.teacher:
            return [LayerCurve(**curve) for curve in run.go({"cores": model_digest(run.parts)})["curves"]]


class _Transfer(StageRun):
    """The loop of this stage; each layer is a part with an optimiser of its own."""

    number = 0
    options: TransferOptions
    teacher: Callable[[Batch], None]

    def __init__(self, model: nn.Module, options: TransferOptions, held_out: Sequence[Batch], **around: Any) -> None:
        self.layers, self.held_out = linearized_layers(model), held_out
        super().__init__(model, {str(n): layer.core for n, layer in self.layers.items()}, options, **around)
        self.before = transfer_errors(model, held_out) if held_out else {}
        self._newest: dict[int, Tensor] = {}

    def step(self) -> Tensor:
        self.teacher(self.batch())
        return torch.stack([self._newest[number] for number in self.layers])

    def learn(self, seen: Observation) -> None:
        """One layer's whole step while the teacher waits; only the new weights outlive the call."""
        layer, name = self.layers[seen.layer_idx], str(seen.layer_idx)
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
        after = transfer_errors(self.model, self.held_out) if self.held_out else {}
        curves = []
        for place, number in enumerate(self.layers):
            losses = [row[place] for row in self.losses()]
            last = losses[-max(1, len(losses) // 10) :] or [float("nan")]
            first, mean = (losses or last)[0], sum(last) / len(last)
            curves.append(asdict(LayerCurve(number, self.before.get(number, first), after.get(number, mean), losses)))
        return {"curves": curves}


def unless_exact(loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Drop the gradient where only rounding is missed: an optimiser would follow noise away from the solution.

    Rounding is that of the teacher, in its dtype, and of sums in fp32. The device is not waited for.
    """
    floor = torch.finfo(dtype).eps ** 2 + (8 * torch.finfo(loss.dtype).eps) ** 2
    return torch.where(loss.detach() > floor, loss, loss * 0)


def transfer_errors(model: nn.Module, batches: Iterable[Batch]) -> dict[int, float]:
    """For each layer, the share of the teacher's output that it misses: ``sum |error|^2 / sum |output|^2``."""
    layers, sums = linearized_layers(model), dict[int, Tensor]()

    @torch.no_grad()
    def observe(seen: Observation) -> None:
        parts = torch.stack(output_error(layers[seen.layer_idx].core, seen)).double().sum(1)
        sums[seen.layer_idx] = sums.get(seen.layer_idx, 0) + parts

    with quiet(model) as device, _stopping(model, observe) as run:
        for batch in batches:
            run(shared(batch, device))
    return {number: float(sums[number][0] / sums[number][1]) for number in layers}


class PassedLayerError(Exception):
    """Raised after the last converted layer, to skip the rest of the forward pass."""


@contextmanager
def _stopping(model: nn.Module, observe: Observer) -> Iterator[Callable[[Batch], None]]:
    """Yield a call of the model, without gradients, that shows layers to ``observe`` and ends after the last."""
    last = max(linearized_layers(model))

    def look(seen: Observation) -> None:
        observe(seen)
        if seen.layer_idx == last:
            raise PassedLayerError

    def run(batch: Batch) -> None:
        with suppress(PassedLayerError), torch.no_grad():
            call(model, batch)

    with observing(model, look):
        yield run


def output_error(core: nn.Module, seen: Observation) -> tuple[Tensor, Tensor]:
    """``sum |student - teacher|^2`` and ``sum |teacher|^2`` of one layer's heads over real tokens, ``(B,)`` each."""
    teacher = wide(seen.output)
    difference = wide(core(seen.q, seen.k, seen.v, x=seen.x, key_mask=seen.key_mask)) - teacher
    if seen.key_mask is not None:
        hidden = ~seen.key_mask[:, None, :, None]
        difference, teacher = difference.masked_fill(hidden, 0), teacher.masked_fill(hidden, 0)
    return difference.square().sum((1, 2, 3)), teacher.square().sum((1, 2, 3))


def relative_error(core: nn.Module, seen: Observation) -> Tensor:
    """The share of the teacher's output that the student misses: 0 is exact, 1 is as bad as no output at all.

    ``mean_b sum |student - teacher|^2 / sum |teacher|^2``: the mean squared error in units that all layers share. It is
    a mean over rows, so that processes that share the rows each compute a part of the loss.
    """
    difference, size = output_error(core, seen)
    return (difference / size.clamp_min(torch.finfo(size.dtype).tiny)).mean()


def row_divergence(core: nn.Module, seen: Observation, *, causal: bool) -> Tensor:
    """``mean_t sum_s p_ts log(p_ts / w_ts)``: cross-entropy of the rows of weights, less the entropy of softmax itself.

    The student's weights w are its outputs for values that are unit vectors, which is right for any attention that is
    linear in its values. Takes ``T^2`` numbers for each head.
    """
    B, H_kv, T, _ = seen.k.shape
    units = torch.eye(T, dtype=seen.v.dtype, device=seen.v.device).expand(B, H_kv, T, T)
    student = wide(core(seen.q, seen.k, units, x=seen.x, key_mask=seen.key_mask))
    group = seen.q.shape[1] // H_kv
    logits = wide(seen.q) @ wide(seen.k).repeat_interleave(group, 1).mT * seen.q.shape[-1] ** -0.5
    visible = torch.ones(T, T, dtype=torch.bool, device=logits.device)
    visible = (visible.tril() if causal else visible)[None, None]
    if seen.key_mask is not None:
        visible = visible & seen.key_mask[:, None, None]
    log_teacher = logits.masked_fill(~visible, float("-inf")).log_softmax(-1)
    smallest = torch.finfo(student.dtype).tiny
    terms = log_teacher.exp() * (log_teacher - student.clamp_min(smallest).log())
    rows = terms.masked_fill(~visible, 0).sum(-1)
    return real_mean(rows, None if seen.key_mask is None else seen.key_mask[:, None].expand_as(rows))


def wide(x: Tensor) -> Tensor:
    """x in fp32 at least."""
    return x.to(compute_dtype(x))


def real_mean(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of rows over real tokens, where the mask is one of these rows."""
    if mask is None or mask.shape != rows.shape:
        return rows.mean()
    real = mask.bool()
    return rows.masked_fill(~real, 0).sum() / real.sum()
