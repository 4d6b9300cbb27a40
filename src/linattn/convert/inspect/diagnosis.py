"""Diagnosis of a pretrained model: its attention, layer by layer, and which candidates could replace it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from linattn.convert.adapters import find_adapter
from linattn.convert.adapters.base import Adapter, Site
from linattn.convert.degrees.allocate import split_cost
from linattn.convert.evaluate.quiet import quiet
from linattn.convert.inspect.fit import CANDIDATES, Fit, Fitter, choose
from linattn.convert.inspect.statistics import LayerFigures, Statistics
from linattn.convert.layer.attention import Observation, Observer, exact_attention
from linattn.convert.training.loop import Batch, Batches, call
from linattn.support.checks import check_integer, check_number
from linattn.support.options import check_option
from linattn.support.progress import Report


@dataclass(frozen=True)
class InspectOptions:
    """Options of a diagnosis.

    Attributes:
        window: tokens that count as near.
        steps: training steps of each candidate, layer by layer; 0: candidates are compared as they start.
        lr: highest learning rate of this training.
        candidates: names, see ``CANDIDATES``; None: all that suit the model.
        tolerance: of the degrees of freedom, in units of the largest eigenvalue.
        points: queries and keys that degrees of freedom are measured on.
        cost: mean dimension that is split between layers; None: the head's.
        seed: random seed.
    """

    window: int = 64
    steps: int = 20
    lr: float = 1e-2
    candidates: tuple[str, ...] | None = None
    tolerance: float = 2**-8
    points: int = 512
    cost: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError that names the option and what is allowed."""
        for name, least in (("window", 1), ("steps", 0), ("points", 8)):
            check_integer(name, getattr(self, name), least)
        check_integer("seed", self.seed, 0)
        if self.cost is not None:
            check_integer("cost", self.cost, 1)
        for name in ("lr", "tolerance"):
            check_number(name, getattr(self, name), above=0)
        for name in self.candidates or ():
            check_option("candidates", name, CANDIDATES)


@dataclass(frozen=True)
class LayerDiagnosis:
    """Diagnosis of one layer: figures per head, what each candidate misses, the best choice and its dimension."""

    layer: int
    figures: LayerFigures
    fits: list[Fit]
    choice: str
    dimension: int

    def as_dict(self) -> dict[str, Any]:
        fits = [fit.as_dict() for fit in self.fits]
        return {
            "layer": self.layer, **asdict(self.figures), "fits": fits, "choice": self.choice,
            "dimension": self.dimension,
        }  # fmt: skip


def inspect(
    model: nn.Module,
    batches: Batches,
    held_out: Sequence[Batch],
    options: InspectOptions | None = None,
    *,
    progress: Report | None = None,
) -> list[LayerDiagnosis]:
    """Diagnose every layer that could be converted; the model itself does not change.

    Args:
        batches: training batches by the number of the step, which candidates are trained on.
        held_out: batches that figures and errors are measured on.
        progress: called with batches done, batches in all, and words.
    """
    options = options or InspectOptions()
    options.check()
    sites, adapter = convertible_sites(model)
    shapes = {site.layer_idx: site.shape for site in sites}
    device = next(model.parameters()).device
    fitter = Fitter(shapes, options.candidates, options.window, options.lr, options.steps, options.seed, device)
    statistics = {index: Statistics(shape, options.window, options.points, options.seed)
                  for index, shape in shapes.items()}  # fmt: skip
    total = options.steps + len(held_out)

    def measure(seen: Observation) -> None:
        fitter.measure(seen)
        statistics[seen.layer_idx].add(seen)

    with quiet(model):
        for step in range(options.steps):
            _show(model, adapter, sites, batches(step), partial(fitter.learn, step=step))
            _tell(progress, step + 1, total, "candidates learn")
        for i, batch in enumerate(held_out):
            _show(model, adapter, sites, batch, measure)
            _tell(progress, options.steps + i + 1, total, "layers are measured")
    figures = {index: each.figures(options.tolerance) for index, each in statistics.items()}
    dims = split_cost(
        {i: max(f.degrees_of_freedom) for i, f in figures.items()}, options.cost or sites[0].shape.head_dim
    )
    found = []
    for index in shapes:
        fits = fitter.fits(index)
        found.append(LayerDiagnosis(index, figures[index], fits, choose(fits).name, dims[index]))
    return found


def convertible_sites(model: nn.Module) -> tuple[list[Site], Adapter]:
    """The attention layers that could be converted, and the model's adapter; raises if there are none."""
    adapter = find_adapter(model)
    sites = adapter.sites(model)
    found = [site for site in sites if site.convertible]
    if not found:
        reasons = {str(site.why_not) for site in sites}
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {'; '.join(sorted(reasons))}")
    return found, adapter


def _show(model: nn.Module, adapter: Adapter, sites: Sequence[Site], batch: Batch, see: Observer) -> None:
    device = next(model.parameters()).device
    with watching(model, adapter, sites, see), torch.no_grad():
        call(model, {name: value.to(device) for name, value in batch.items()})


@contextmanager
def watching(model: nn.Module, adapter: Adapter, sites: Sequence[Site], see: Observer) -> Iterator[None]:
    """Show ``see`` what each layer gets in every call of the model, as an :class:`Observation`; replaces nothing."""
    with ExitStack() as hooks:
        for site in sites:
            module = model.get_submodule(site.name)

            def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site = site) -> None:
                x, named = adapter.hidden(args, kwargs)
                q, k, v = adapter.project(module, x, **named)
                q = q * (adapter.scale(module) * site.shape.head_dim**0.5)
                mask = adapter.key_mask(**named)
                output = exact_attention(q, k, v, mask, causal=site.shape.causal)
                q, k, v, x, output = (tensor.detach() for tensor in (q, k, v, x, output))
                with torch.enable_grad():  # observers may learn from what they see
                    see(Observation(site.layer_idx, q, k, v, x, mask, output))

            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


def _tell(progress: Callable[[int, int, str], None] | None, done: int, total: int, words: str) -> None:
    if progress is not None:
        progress(done, total, words)
