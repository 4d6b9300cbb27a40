"""``linattn graph scaling``: what a training step of graph models costs as the graph grows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import measure_in_turns
from linattn.lab.cases import Work
from linattn.lab.experiment import Experiment
from linattn.lab.kept import Case
from linattn.lab.page.numbers import MISSING, binary, short
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
    max_seconds: float = option(60.0, "Leave out sizes whose step is predicted to take longer.", least=0)
    seed: int = option(0, "Seed of graphs and weights.", least=0)

    def at_a_time(self) -> int:
        return self.jobs or 1  # others would disturb the times

    def cases(self) -> list[dict[str, Any]]:
        common = {"nodes": sorted(set(self.nodes)), "repeats": self.repeats, "max_seconds": self.max_seconds,
                  "seed": self.seed, "device": str(self.place())}  # fmt: skip
        recipes = {name: graph_recipe(name, "nodes", "") for name in self.models}
        return [
            {"model": name, "hidden": self.hidden or recipe.hidden, "options": dict(recipe.options), **common}
            for name, recipe in recipes.items()
        ]

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        return {"rows": list(_rows(case, work))}

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
            timed = [row for row in rows if row["model"] == model and row.get("median_ms") is not None]
            if len(timed) < 2:
                continue
            (n, ms), (nodes, last) = ((row["nodes"], row["median_ms"]) for row in timed[-2:])
            each = f"{timed[-1]['peak_bytes'] / nodes / 1024:,.1f} KiB a node"
            said.append(
                f"{model}: time grows as nodes^{log(last / ms) / log(nodes / n):.2f} from {n:,} to {nodes:,}; {each}."
            )
        return said

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        shown: dict[str, Callable[[Any], str]] = {
            "model": str, "nodes": "{:,}".format, "edges": "{:,}".format, "median_ms": "{:,.1f}".format,
            "peak_bytes": binary, "error_of_logits": "{:.1e}".format, "status": str,
        }  # fmt: skip

        def cell(value: Any, show: Callable[[Any], str]) -> str:
            return MISSING if value is None or value != value else show(value)

        cells: list[list[object]] = [[cell(row.get(name), show) for name, show in shown.items()] for row in rows]
        return ["model", "nodes", "edges", "ms", "peak memory", "error", "status"], cells

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> "list[Section]":
        from linattn.lab.page import Section
        from linattn.lab.page.plots import Chart, Panel
        from linattn.lab.page.style import styles

        look = styles(list(dict.fromkeys(frame["model"])))
        shown = (("median_ms", "Time of a training step, ms", 1), ("peak_bytes", "Peak memory of it, MiB", 2**20))
        draws = {
            title: partial(_draw, frame=frame, look=look, name=name, title=title, unit=u) for name, title, u in shown
        }
        panels = [Panel(draw, title, left=0.7) for title, draw in draws.items()]
        reading = "Both axes are logarithmic: a line that rises by a decade each decade is linear in the nodes."
        names, cells = self.table(frame.to_dict("records"))
        text = "Error: of fp32 logits against fp64, of the largest. Memory: of a step, beside graph and weights."
        chart = Chart("graph-scaling", "Cost of a training step", reading, panels, look)
        return [Section(chart.title, chart=chart), Section("Every number", text, type(frame)(cells, columns=names))]


def _rows(case: Case, work: Work) -> Iterator[Row]:
    """A row for each size. A size that would take too long, and all larger ones, are left out."""
    torch.manual_seed(case["seed"])
    model = create_graph_model(
        case["model"], in_channels=FEATURES, hidden=case["hidden"], out_channels=CLASSES, **case["options"]
    ).to(case["device"])
    status, last = "ok", (0, 0.0)
    for number, nodes in enumerate(case["nodes"]):
        work.tell(number / len(case["nodes"]), f"{nodes:,} nodes")
        data = communities(nodes, CLASSES, DEGREE, features=FEATURES, seed=case["seed"])
        if last[0] and last[1] * nodes / last[0] > case["max_seconds"]:
            status = "left out"
        row: Row = {"nodes": nodes, "edges": data.num_edges // 2, "status": status}
        if status == "ok":
            data = replace(data, x=nn.functional.normalize(data.x)).to(case["device"])
            try:
                row |= measure_step(deepcopy(model), data, case["repeats"])
                last = nodes, row["median_ms"] / 1000
            except torch.OutOfMemoryError:
                row["status"] = status = "out of memory"
        yield row


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
        "status": "ok" if error <= MOST_ERROR else "WRONG", "error_of_logits": error, "peak_bytes": peak,
        "median_ms": 1000 * timing.median, "p20_ms": 1000 * timing.p20, "p80_ms": 1000 * timing.p80,
    }  # fmt: skip


@torch.no_grad()
def logits_error(model: nn.Module, data: GraphData) -> float:
    """Largest difference of logits from the same model in fp64, divided by the largest logit."""
    model.eval()
    exact = deepcopy(model).double()(replace(data, x=data.x.double()))
    return float((model(data) - exact).abs().max() / exact.abs().max())


def _draw(axes: Any, *, frame: "DataFrame", look: Mapping[str, Any], name: str, title: str, unit: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    from linattn.lab.page.plots import plot_line

    for model, style in look.items():
        rows = frame[(frame["model"] == model) & frame[name].notna()]
        plot_line(axes, list(rows["nodes"]), list(rows[name] / unit), style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))  # powers would be in TeX
    sizes = sorted(set(frame["nodes"]))
    axes.set_xticks(sizes, [short(size) for size in sizes])
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("nodes")
