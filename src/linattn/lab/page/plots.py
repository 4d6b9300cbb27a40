"""Panels of charts, drawn once and saved twice: side by side in a PNG, and each as an SVG inside the page."""

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from linattn.lab.page.markup import Markup, element, join
from linattn.lab.page.style import INK, MUTED, PAPER, RULE, Style, color_variables
from linattn.support.files import write_atomically

WIDTH, TOP, BOTTOM, RIGHT = 4.2, 0.34, 0.5, 0.14  # inches; small panels, so that text stays readable on a phone
LEGEND_LINE, LEGEND_COLUMNS = 0.26, 4


@dataclass(frozen=True)
class Panel:
    """One pair of axes: ``draw`` fills it, ``alt`` describes it in words."""

    draw: Callable[[Any], None]
    alt: str
    height: float = 3.2
    left: float = 0.56
    right: float = RIGHT


@dataclass(frozen=True)
class Chart:
    """Panels under one heading, with a plain sentence on how to read them."""

    name: str
    title: str
    reading: str
    panels: list[Panel]
    legend: dict[str, Style] = field(default_factory=dict)


def save_png(chart: Chart, path: Path) -> None:
    """Save all panels side by side, with the legend below."""
    from matplotlib.lines import Line2D

    with settings(chart.name):
        columns = _legend_columns(chart)
        lines = ceil(len(chart.legend) / columns) * LEGEND_LINE
        height = max(panel.height for panel in chart.panels) + lines
        figure = figure_of(WIDTH * len(chart.panels), height, PAPER)
        for i, panel in enumerate(chart.panels):
            panel.draw(_axes(figure, panel, WIDTH * i, lines))
        if chart.legend:
            handles = [Line2D([], [], **_look(style), label=name) for name, style in chart.legend.items()]
            figure.legend(handles=handles, loc="lower center", ncols=min(columns, len(handles)), frameon=False)
        write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160, metadata={"Software": None}))


def _legend_columns(chart: Chart) -> int:
    """Number of columns that fit side by side: fewer if names are long."""
    longest = max(map(len, chart.legend), default=0)
    fitting = int(WIDTH * len(chart.panels) / (0.55 + 0.075 * longest))
    return max(1, min(LEGEND_COLUMNS * len(chart.panels), fitting))


def svg(chart: Chart, index: int) -> Markup:
    """One panel as an inline SVG whose colours follow the page and whose ids are unique in it."""
    panel, prefix = chart.panels[index], f"{chart.name}-{index}"
    with settings(prefix):
        figure = figure_of(WIDTH, panel.height, "none")
        panel.draw(_axes(figure, panel, 0.0, 0.0))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)  # it would style the whole page
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'\b(?:xlink:)?href="#', f'href="#{prefix}-', body).replace("url(#", f"url(#{prefix}-")
    for color, variable in color_variables().items():
        body = body.replace(color, f"var({variable})")
    box = f"0 0 {WIDTH * 72:g} {panel.height * 72:g}"
    return element("svg", Markup(body), viewBox=box, role="img", aria_label=panel.alt)


def key(name: str, style: Style, outline: str) -> Markup:
    """A mechanism's marker followed by its name."""
    paint = f"var({style.variable})"
    path = element("path", d=outline, style=f"fill:none;stroke:{paint}" if style.hollow else f"fill:{paint}")
    mark = element("svg", path, class_="mark", viewBox="0 0 12 12", aria_hidden="true")
    return element("span", mark, join(name), class_="key")


def plot_line(axes: Any, x: list[float], y: list[float], style: Style, every: int = 1) -> None:
    """Draw a mechanism's line; if there are many points, only some get markers."""
    axes.plot(x, y, **_look(style), markevery=every, markersize=4.5, zorder=3 if style.emphasised else 2)


def _look(style: Style) -> dict[str, Any]:
    """Style of a line and its markers."""
    return {"color": style.color, "marker": style.marker, "markerfacecolor": style.face, "linestyle": style.line,
            "linewidth": 2.6 if style.emphasised else 1.4}  # fmt: skip


def figure_of(width: float, height: float, paper: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=72, facecolor=paper)  # at 72 dpi a pixel is a point
    FigureCanvasAgg(figure)  # no global state, no display
    return figure


def _axes(figure: Any, panel: Panel, x: float, y: float) -> Any:
    """Axes with fixed margins: positions of labels are known before anything is drawn, and panels line up."""
    width, height = figure.get_size_inches()
    inner = WIDTH - panel.left - panel.right, panel.height - TOP - BOTTOM
    y = height - panel.height + BOTTOM if y else BOTTOM
    axes = figure.add_axes(((x + panel.left) / width, y / height, inner[0] / width, inner[1] / height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return axes


def settings(salt: str) -> AbstractContextManager[None]:
    """Matplotlib's settings for one figure, restored afterwards: the SVG writer only reads global settings."""
    from matplotlib import rc_context

    values: Any = {
        "font.family": ["DejaVu Sans"],  # comes with matplotlib
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.labelsize": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 9,
        "text.color": INK,
        "text.parse_math": False,  # show a dollar in a name as it is
        "axes.edgecolor": MUTED,
        "axes.titlecolor": INK,
        "axes.labelcolor": MUTED,
        "axes.facecolor": "none",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "grid.color": RULE,
        "axes.linewidth": 0.7,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "grid.linewidth": 0.7,
        "axes.titlelocation": "left",
        "axes.titlepad": 8.0,
        "axes.grid": True,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
    }
    return rc_context(values)
