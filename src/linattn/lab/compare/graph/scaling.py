"""Measures what a training step of graph models costs as the graph grows."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from linattn.lab.bench.fit import growth_exponent
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import measure_in_turns
from linattn.lab.tasks.graph import GraphData, communities
from linattn.lab.train.graph.recipes import graph_recipe
from linattn.models.graph import create_graph_model, graph_models
from linattn.support.machine import describe_run
from linattn.support.options import OptionError, check_device, check_option

MOST_ERROR = 1e-3  # of the largest logit: correct fp32 sums over a million nodes stay well below, wrong ones do not
CLASSES, FEATURES, DEGREE = 8, 64, 8


@dataclass(frozen=True)
class ScalingConfig:
    """Models and sizes to measure, on generated graphs with 8 edges per node on average."""

    models: tuple[str, ...] = ("gcn", "euclidean", "pseudo_riemannian")
    nodes: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    hidden: int | None = None
    """Width of all models; None: as in each model's recipe."""
    device: str = "cpu"
    repeats: int = 5
    max_seconds: float = 60.0
    """Sizes whose step is predicted to take longer are left out."""
    seed: int = 0

    def check(self) -> None:
        if not self.models or not self.nodes:
            raise OptionError("models" if not self.models else "nodes", "name at least one")
        for name in self.models:
            check_option("models", name, graph_models())
        if min(self.nodes) < CLASSES:
            raise OptionError("nodes", f"must be at least {CLASSES}, got {min(self.nodes)}")
        if self.repeats < 1:
            raise OptionError("repeats", f"must be an integer >= 1, got {self.repeats}")
        check_device(self.device)


@dataclass
class ScalingRow:
    """One model at one size; ``error``: largest error of fp32 logits against fp64, over the largest fp64 logit."""

    model: str
    nodes: int
    edges: int
    parameters: int = 0
    status: str = "ok"  # WRONG, left out, out of memory
    error: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    peak_bytes: int | None = None


@dataclass
class ScalingResult:
    meta: dict[str, Any]
    rows: list[ScalingRow] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for row in self.rows))

    def measured(self, model: str) -> list[ScalingRow]:
        """The rows of a model that have times, the largest graph last."""
        return [row for row in self.rows if row.model == model and row.median_ms is not None]

    def growth(self, model: str) -> float | None:
        """p of ``time = c nodes^p`` between the two largest sizes; at small ones the fixed cost of a call hides it."""
        return growth_exponent({row.nodes: row.median_ms or 0.0 for row in self.measured(model)[-2:]})

    def bytes_per_node(self, model: str) -> float | None:
        """Peak memory of a step divided by the number of nodes, at the largest size."""
        rows = self.measured(model)
        return None if not rows or rows[-1].peak_bytes is None else rows[-1].peak_bytes / rows[-1].nodes

    def words(self, model: str) -> str | None:
        """Growth and memory in words; None if there is only one size."""
        growth, each = self.growth(model), self.bytes_per_node(model)
        if growth is None or each is None:
            return None
        first, last = (row.nodes for row in self.measured(model)[-2:])
        return f"{model}: time grows as nodes^{growth:.2f} from {first:,} to {last:,}; {each / 1024:,.1f} KiB a node"

    def as_json(self) -> dict[str, Any]:
        growth = {name: self.growth(name) for name in self.models}
        each = {name: self.bytes_per_node(name) for name in self.models}
        rows = [asdict(row) for row in self.rows]
        return {"meta": self.meta, "growth": growth, "bytes_per_node": each, "rows": rows}


def measure_scaling(config: ScalingConfig, on_row: Callable[[ScalingResult], None]) -> ScalingResult:
    """Measure time and peak memory of forward, loss, backward and Adam on whole graphs; call ``on_row`` for every row.

    The memory of a step does not include the graph and the weights, but gradients and the first step of Adam.
    """
    config.check()
    meta = describe_run(torch.device(config.device)) | {"seed": config.seed, "settings": asdict(config)}
    result = ScalingResult(meta)
    for nodes in sorted(set(config.nodes)):
        data = communities(nodes, CLASSES, DEGREE, features=FEATURES, seed=config.seed)
        data = replace(data, x=nn.functional.normalize(data.x)).to(config.device)
        for name in config.models:
            result.rows.append(_row(name, data, config, result))
            on_row(result)
    return result


def _row(name: str, data: GraphData, config: ScalingConfig, result: ScalingResult) -> ScalingRow:
    row = ScalingRow(name, data.num_nodes, data.num_edges // 2)
    before = [r for r in result.rows if r.model == name]
    if before and (before[-1].median_ms is None or _predicted(before[-1], row) > config.max_seconds):
        row.status = before[-1].status if before[-1].status == "out of memory" else "left out"
        return row
    recipe = graph_recipe(name, "nodes", data.name)
    torch.manual_seed(config.seed)
    model = create_graph_model(
        name, in_channels=FEATURES, hidden=config.hidden or recipe.hidden, out_channels=CLASSES,
        **recipe.options,
    ).to(config.device)  # fmt: skip
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch.device(config.device)
    try:
        row.error = logits_error(model, data)
        step = training_step(model, data)
        row.peak_bytes = peak_bytes(step, device)
        timing = measure_in_turns({name: step}, device, min_seconds=0, min_repeats=config.repeats)[name]
    except torch.OutOfMemoryError:
        row.status = "out of memory"
        return row
    row.median_ms, row.p20_ms, row.p80_ms = (1000 * t for t in (timing.median, timing.p20, timing.p80))
    if not row.error <= MOST_ERROR:
        row.status = "WRONG"
    return row


def _predicted(last: ScalingRow, row: ScalingRow) -> float:
    """Predicted seconds of a step, if time is proportional to the number of nodes."""
    return (last.median_ms or 0.0) / 1000 * row.nodes / last.nodes


def training_step(model: nn.Module, data: GraphData) -> Callable[[], object]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    assert data.y is not None
    labels = data.y

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()

    return step


@torch.no_grad()
def logits_error(model: nn.Module, data: GraphData) -> float:
    """Largest difference of logits from the same model in fp64, divided by the largest logit."""
    model.eval()
    exact = deepcopy(model).double()(replace(data, x=data.x.double()))
    return float((model(data) - exact).abs().max() / exact.abs().max())
