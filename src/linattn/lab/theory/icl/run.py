"""The experiment: a stack of models for each family of cases, trained, then measured beside the formulas."""

from collections.abc import Callable
from zlib import crc32

import torch
from torch import nn

from linattn.lab.theory.icl.case import FAMILIES
from linattn.lab.theory.icl.data.base import Weighting
from linattn.lab.theory.icl.measure import learnt_steps, measure_risks, step_errors
from linattn.lab.theory.icl.mechanism import MechanismStack
from linattn.lab.theory.icl.models import AdaptedStack, LinearStack, make_stack
from linattn.lab.theory.icl.rows import Result, Row
from linattn.lab.theory.icl.settings import MODELS, IclConfig
from linattn.lab.theory.icl.tasks import Cell, TaskStream
from linattn.lab.theory.icl.train import Recipe, fit
from linattn.lab.theory.meta import lab_meta

WEIGHTING: dict[str, Weighting] = {"h3": "free", "gated": "geometric"}  # of the formula to compare with
OnStep = Callable[[], None]


def new_result(config: IclConfig, command: list[str] | None = None) -> Result:
    return Result(lab_meta(config, config.device, command))


def steps_of(config: IclConfig, family: str) -> int:
    """Training steps of a unit; an update includes the training of the model that it updates."""
    return config.steps * (2 if family == "low-rank-update" else 1)


def run_unit(config: IclConfig, family: str, model: str, on_step: OnStep = lambda: None) -> list[Row]:
    """Train the models of all cases, lengths and seeds of a family at once; returns a row for each."""
    cases = FAMILIES[family](config.d)
    cells = [Cell(case, n, seed) for case in cases for n in config.lengths for seed in range(config.seeds)]
    optima = [cell.case.optimum(cell.n, WEIGHTING.get(model, "uniform")) for cell in cells]
    stack = _trained(config, family, model, cells, on_step)
    # Seeded by the family alone, so that all its models are tested on the same tasks.
    test = TaskStream(cells, _generator(config, "test", family))
    risks = measure_risks(stack, test, optima, config.tests, 2 * config.batch)
    measured = model in MODELS
    errors = step_errors(learnt_steps(stack, test), optima) if measured else [None] * len(cells)
    numbers = zip(cells, optima, errors, *(own.tolist() for own in risks), strict=True)
    rows = []
    for cell, optimum, error, trained, standard_error, formula in numbers:
        unit = cell.case.data.power / config.d
        theory = optimum.risk / config.d
        rows.append(
            Row(family, cell.case.label, model, cell.n, cell.seed, theory, formula * unit, trained * unit,
                standard_error * unit, trained * unit / theory - 1, trained / formula - 1, error)
        )  # fmt: skip
    return rows


def _trained(config: IclConfig, family: str, model: str, cells: list[Cell], on_step: OnStep) -> nn.Module:
    generator = _generator(config, "train", family, model)
    recipe = Recipe(config.steps, config.batch, config.lr)
    stream, width, count = TaskStream(cells, generator), config.d + 1, len(cells)
    ranks = [cell.case.rank or 0 for cell in cells]
    if family == "low-rank-update":
        base = LinearStack(count, width, generator)
        fit(base, TaskStream(cells, generator, sources=True), recipe, on_step)
        stack: nn.Module = AdaptedStack(base, width, generator, ranks)
        fit(stack, stream, recipe, on_step)
        return stack
    if family == "low-rank":
        stack = LinearStack(count, width, generator, ranks)
    elif model not in MODELS:
        stack = MechanismStack(model, count, width, generator)
    else:
        stack = make_stack(model, count, width, stream.most + 1, generator)
    fit(stack, stream, recipe, on_step)
    return stack


def _generator(config: IclConfig, *names: str) -> torch.Generator:
    seed = crc32(" ".join(names).encode()) + (config.seed << 32)
    return torch.Generator(device=config.device).manual_seed(seed)
