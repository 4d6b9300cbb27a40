"""``linattn graph scaling``: what a training step of graph models costs as the graph grows."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import measure_in_turns
from linattn.lab.cases import Case, Work
from linattn.lab.experiment import Experiment
from linattn.lab.page.numbers import short
from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.generated import communities
from linattn.lab.train.graph_recipes import graph_recipe
from linattn.models.graph import create_graph_model, graph_models
from linattn.support.config import option

if TYPE_CHECKING:
    from pandas import DataFrame

    from linattn.lab.page import Section

MOST_ERROR = 1e-3  # of the largest logit: correct fp32 sums over a million nodes stay well below, wrong ones do not
CLASSES, FEATURES, DEGREE = 8, 64, 8
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GraphScaling(Experiment):
    """Time and memory of one training step against the number of nodes, each model checked against fp64.

    Graphs are generated, with 8 edges a node on average. The memory is that of forward, loss, backward and Adam beside
    the graph and the weights. Exit code: 0 all right, 1 a row was WRONG, 2 a bad option.
    """

    name: ClassVar[str] = "graph-scaling"
    models: tuple[str, ...] = option(("gcn", "euclidean", "pseudo_riemannian"), "Models.", choices=graph_models)
    nodes: tuple[int, ...] = option((1_000, 10_000, 100_000, 1_000_000), "Sizes of the graphs.", least=CLASSES)
    hidden: int | None = option(None, "Width of all models.", least=1, default_text="by model")
    repeats: int = option(5, "Steps timed, at least.", least=1)
    seed: int = option(0, "Seed of graphs and weights.", least=0)

    def at_a_time(self) -> int:
        return self.jobs or 1  # others would disturb the times

    def cases(self) -> list[dict[str, Any]]:
        common = {"repeats": self.repeats, "seed": self.seed, "device": str(self.place())}
        recipes = {name: graph_recipe(name, "nodes", "") for name in self.models}
        return [
            {"model": name, "nodes": nodes, "hidden": self.hidden or own.hidden, "options": dict(own.options), **common}
            for name, own in recipes.items()
            for nodes in sorted(set(self.nodes))
        ]

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        torch.manual_seed(case["seed"])
        sizes = {"in_channels": FEATURES, "hidden": case["hidden"], "out_channels": CLASSES}
        model = create_graph_model(case["model"], **sizes, **case["options"]).to(case["device"])
        data = communities(case["nodes"], CLASSES, DEGREE, features=FEATURES, seed=case["seed"])
        data = replace(data, x=nn.functional.normalize(data.x)).to(case["device"])
        return {"edges": data.num_edges // 2, **measure_step(model, data, case["repeats"])}

    def wrong(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return [
            f"WRONG: {row['model']}, {row['nodes']:,} nodes: {row['error_of_logits']:.1e} of the largest logit"
            for row in rows
            if row["status"] == "WRONG"
        ]

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Growth between the two largest sizes, as the fixed cost of a call hides it at small ones; memory."""
        said = []
        for model in dict.fromkeys(row["model"] for row in rows):
            timed = [row for row in rows if row["model"] == model]
            if len(timed) > 1:
                (n, ms), (nodes, last) = ((row["nodes"], row["median_ms"]) for row in timed[-2:])
                power = f"nodes^{log(last / ms) / log(nodes / n):.2f} from {n:,} to {nodes:,}"
                said.append(
                    f"{model}: time grows as {power}; {timed[-1]['peak_bytes'] / nodes / 1024:,.1f} KiB a node."
                )
        return said

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> "list[Section]":
        from linattn.lab.page import Section
        from linattn.lab.page.plots import Chart, Panel, styles

        look = styles(list(dict.fromkeys(frame["model"])))
        panels = [
            Panel(partial(_draw, frame=frame, look=look, name=name, title=title, unit=unit), title, left=0.7)
            for name, title, unit in (
                ("median_ms", "Time of a training step, ms", 1),
                ("peak_bytes", "Peak memory of it, MiB", 2**20),
            )
        ]
        reading = "Both axes are logarithmic: a line that rises by a decade each decade is linear in the nodes."
        text = "Error: of fp32 logits against fp64, of the largest. Memory: of a step, beside graph and weights."
        chart = Chart("graph-scaling", "Cost of a training step", reading, panels, look)
        return [Section(chart.title, chart=chart), Section("Every number", text, frame)]


def measure_step(model: nn.Module, data: GraphData, repeats: int) -> Row:
    """Time and peak memory of a training step; ``error_of_logits``: of fp32 against fp64, over the largest of fp64."""
    device, error = data.x.device, logits_error(model, data)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(data), data.y).backward()  # type: ignore[arg-type]
        optimizer.step()

    peak = peak_bytes(step, device)
    timing = measure_in_turns({"step": step}, device, min_seconds=0, min_repeats=repeats)["step"]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "status": "ok" if error <= MOST_ERROR else "WRONG",
        "error_of_logits": error,
        "peak_bytes": peak,
        **timing.row(),
    }


@torch.no_grad()
def logits_error(model: nn.Module, data: GraphData) -> float:
    """Largest difference of logits from the same model in fp64, divided by the largest logit."""
    model.eval()
    exact = deepcopy(model).double()(replace(data, x=data.x.double()))
    return float((model(data) - exact).abs().max() / exact.abs().max())


def _draw(axes: Any, frame: "DataFrame", look: Mapping[str, Any], name: str, title: str, unit: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    from linattn.lab.page.plots import plot_line

    for model, style in look.items():
        rows = frame[(frame["model"] == model) & frame[name].notna()]
        plot_line(axes, list(rows["nodes"]), list(rows[name] / unit), style)
    axes.set(xscale="log", yscale="log", title=title, xlabel="nodes")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))  # powers would be in TeX
    sizes = sorted(set(frame["nodes"]))
    axes.set_xticks(sizes, [short(size) for size in sizes])
    axes.minorticks_off()
