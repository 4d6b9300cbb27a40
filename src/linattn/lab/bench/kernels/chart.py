"""The chart of a race: time over the floor, a line per case, with the goals."""

from pathlib import Path
from typing import Any

from linattn.lab.bench.kernels.cases import FLOOR, IN_PLACE, OURS, Goal
from linattn.lab.bench.kernels.rows import KERNELS, KernelsResult
from linattn.lab.bench.kernels.table import setting
from linattn.lab.bench.passes import FORWARD, TRAINING
from linattn.support.extras import need
from linattn.support.files import write_atomically

# By how a contender's name starts; markers also differ, for readers with colour blindness.
STYLES = {
    IN_PLACE: ("#d55e00", "*"),
    OURS: ("#d55e00", "D"),
    "linattn": ("#e69f00", "^"),
    "fla": ("#0072b2", "o"),
    "mlstm_kernels": ("#009e73", "P"),
    "torch.compile": ("#cc79a7", "v"),
    "eager": ("#999999", "X"),
    "SDPA": ("#444444", "s"),
}


def draw_kernels_chart(result: KernelsResult, path: Path) -> None:
    """Two panels, forward and forward with backward; only rows that count are drawn, wrong ones hollow."""
    need("a chart", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [c for c in result.case_names() if any(r.case == c and r.over_floor for r in result.rows)]
    figure = Figure(figsize=(13, 1.8 + 0.33 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(1, 2, sharey=True)
    for panel, pass_name in zip(panels, (FORWARD, TRAINING), strict=True):
        _panel(panel, result, cases, pass_name)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].invert_yaxis()
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"time over floor: {setting(result)}", fontsize=10)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))


def _panel(panel: Any, result: KernelsResult, cases: list[str], pass_name: str) -> None:
    for y, case in enumerate(cases):
        if case in KERNELS:
            goals = KERNELS[case].forward if pass_name == FORWARD else KERNELS[case].training
            marks = (goal_over_floor(result, case, pass_name, goal) for goal in goals)
            for mark in filter(None, marks):
                panel.plot([mark], [y], marker="|", markersize=13, color="#000000", linestyle="none", label="goal")
    for row in result.rows:
        if row.pass_name == pass_name and row.over_floor and row.status in ("ok", "WRONG"):
            color, marker = style(row.contender)
            face = color if row.status == "ok" else "none"
            label = next((prefix for prefix in STYLES if row.contender.startswith(prefix)), row.contender)
            panel.plot(
                [row.over_floor], [cases.index(row.case)], marker=marker, color=color, markerfacecolor=face,
                linestyle="none", markersize=6, label=label if row.status == "ok" else f"{label} (WRONG)",
            )  # fmt: skip
    panel.axvline(1, color="#999999", linewidth=1)
    panel.set_xscale("log")
    panel.set(title=pass_name, xlabel="time over floor")
    panel.grid(alpha=0.3)


def goal_over_floor(result: KernelsResult, case: str, pass_name: str, goal: Goal) -> float | None:
    """Position of a goal on the axis; None if the contender that it refers to was not measured."""
    if goal.against == FLOOR:
        return goal.limit
    own = next((r.floor_ms for r in result.rows if (r.case, r.pass_name) == (case, pass_name) and r.floor_ms), None)
    other = result.find(goal.case or case, goal.against, pass_name)
    if own is None or other is None or other.median_ms is None:
        return None
    return goal.limit * other.median_ms / own


def style(contender: str) -> tuple[str, str]:
    return next((look for prefix, look in STYLES.items() if contender.startswith(prefix)), ("#000000", "."))
