"""Charts of what a mechanism costs: memory, operations and parameters as bars."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from linattn.lab.page.numbers import BINARY, PREFIXES, Prefixes, Unit, common_unit
from linattn.lab.page.plots import Chart, Panel
from linattn.lab.page.style import INK, MUTED, Style, styles
from linattn.lab.pages.read import Comparison

MIB = Unit(2**20, "Mi", 1)


@dataclass(frozen=True)
class Cost:
    """What one chart shows; ``part`` is the share of ``field`` that is drawn dark."""

    field: str
    title: Callable[[Unit], str]
    unit: Unit | None = None
    part: str | None = None
    prefixes: Prefixes = PREFIXES


COSTS = (
    Cost("peak_bytes_train", lambda unit: "Peak memory of training, MiB", MIB),
    Cost("flops", lambda unit: f"Operations of one image, {unit.prefix}FLOPs", part="attention_flops"),
    Cost("state_bytes", lambda unit: f"State of one sequence, {unit.prefix}B", prefixes=BINARY),
)


def cost_chart(comparison: Comparison) -> Chart | None:
    panels = []
    for cost in COSTS:
        values = {name: v for name in comparison.names if (v := comparison.value(name, cost.field)) is not None}
        if not values:
            continue
        parts = {name: comparison.value(name, cost.part) for name in values} if cost.part else {}
        unit = cost.unit or common_unit(values.values(), prefixes=cost.prefixes)
        title = cost.title(unit)
        alt = f"{title}: " + "; ".join(f"{name} {unit.text(value)}" for name, value in values.items()) + "."
        draw = partial(_draw, values=values, parts=parts, unit=unit, title=title, look=styles(comparison.names))
        longest = max(map(len, values))
        panels.append(Panel(draw, alt, height=0.95 + 0.26 * len(values), left=min(0.3 + 0.075 * longest, 1.5)))
    if not panels:
        return None
    reading = "Shorter is cheaper. Memory is the most that one training step needed; "
    if comparison.words.unit == "images":
        reading += "of the operations the dark part is attention, the pale part the rest of the host."
        return Chart("cost", "Memory and operations", reading, panels)
    reading += "the state is all that is kept of one sequence to go on from, over all layers."
    return Chart("cost", "Memory and state", reading, panels)


def _draw(
    axes: Any,
    *,
    values: dict[str, float],
    parts: dict[str, float | None],
    unit: Unit,
    title: str,
    look: dict[str, Style],
) -> None:
    highest = max(values.values()) / unit.factor or 1.0
    for y, (name, value) in enumerate(values.items()):
        part = parts.get(name) if parts else value
        axes.barh(y, value / unit.factor, 0.62, color=look[name].color, alpha=0.35 if parts else 1.0, linewidth=0)
        if parts and part:
            axes.barh(y, part / unit.factor, 0.62, color=look[name].color, linewidth=0)
        text = unit.text(value)
        axes.text(value / unit.factor + highest * 0.015, y, text, va="center", color=MUTED, fontsize=8.5)
    axes.set_yticks(range(len(values)), list(values), color=INK)
    for label, name in zip(axes.get_yticklabels(), values, strict=True):
        label.set_fontweight("bold" if look[name].emphasised else "normal")
    axes.set_ylim(len(values) - 0.45, -0.55)
    axes.set_xlim(0, highest * 1.2)
    axes.set_title(title)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(_few_ticks())


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, steps=[1, 2, 5, 10])
