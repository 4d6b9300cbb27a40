"""Panels of charts, drawn once and saved twice: side by side in a PNG, and each as an SVG inside the page.

A mechanism has one colour and one marker, the same in every chart and table.
"""

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

from linattn.support.files import write_atomically

REFERENCE = "softmax"  # the mechanism that others are compared with
# Okabe and Ito's colours, which are distinct to readers with colour blindness; mechanisms also differ in their markers.
# The style sheet of the page has all colours by name, and others for dark pages.
REFERENCE_COLOR = "#444444"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, RULE, PAPER = "#1d2127", "#5b636e", "#dfe2e6", "#fefefe"
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"} | {
    color: f"--series-{number}" for number, color in enumerate((REFERENCE_COLOR, *COLORS))
}
# Matplotlib's markers with the signs that stand for them in text. The numbers of markers and colours have no common
# divisor: 66 mechanisms before a pair repeats.
MARKERS = dict(zip("o^DvPX<>phd", "●▲◆▼✚✕◄►⬟⬢♦", strict=True))
REFERENCE_MARKER = "s"

WIDTH, TOP, BOTTOM, RIGHT = 4.2, 0.34, 0.5, 0.14  # inches; small panels, so that text stays readable on a phone
LEGEND_LINE, LEGEND_COLUMNS = 0.26, 4


@dataclass(frozen=True)
class Style:
    """How one mechanism is drawn.

    ``hollow``: an outlined marker and a dashed line, for a mechanism shown beside its own version without an extra
        part.
    """

    color: str
    marker: str
    emphasised: bool = False
    hollow: bool = False

    @property
    def variable(self) -> str:
        """The colour's name in the page's style sheet."""
        return VARIABLES[self.color]

    @property
    def sign(self) -> str:
        return MARKERS.get(self.marker, "■")

    def look(self) -> dict[str, Any]:
        """The line and its markers, as matplotlib takes them."""
        return {
            "color": self.color,
            "marker": self.marker,
            "markerfacecolor": PAPER if self.hollow else self.color,
            "linestyle": "--" if self.hollow else "-",
            "linewidth": 2.6 if self.emphasised else 1.4,
        }


def styles(names: list[str]) -> dict[str, Style]:
    """Assign styles in the order of ``names``; the reference is grey and emphasised wherever it is.

    ``gated+ABCD`` (with Canon layers) looks like ``gated``, if both are there, but hollow.

    Example:
        >>> found = styles(["relu", "softmax", "nala", "nala+ABCD"])
        >>> found["softmax"].emphasised, found["nala"].color, found["nala"].marker
        (True, '#d55e00', '^')
        >>> found["nala+ABCD"] == replace(found["nala"], hollow=True)
        True
    """
    plain = {name: re.sub(r"\+\w+", "", name) for name in names}
    own = [name for name in names if plain[name] == name or plain[name] not in names]
    others = [name for name in own if name != REFERENCE]
    found = {REFERENCE: Style(REFERENCE_COLOR, REFERENCE_MARKER, emphasised=True)}
    pairs = zip(cycle(COLORS), cycle(MARKERS), strict=False)
    found |= {name: Style(*pair) for name, pair in zip(others, pairs, strict=False)}
    return {name: found[name] if name in found else replace(found[plain[name]], hollow=True) for name in names}


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
        longest = max(map(len, chart.legend), default=0)  # fewer columns if names are long
        fitting = int(WIDTH * len(chart.panels) / (0.55 + 0.075 * longest))
        columns = max(1, min(LEGEND_COLUMNS * len(chart.panels), fitting))
        lines = ceil(len(chart.legend) / columns) * LEGEND_LINE
        height = max(panel.height for panel in chart.panels) + lines
        figure = figure_of(WIDTH * len(chart.panels), height, PAPER)
        for number, panel in enumerate(chart.panels):
            panel.draw(axes_of(figure, panel, WIDTH * number, lines))
        if chart.legend:
            handles = [Line2D([], [], **style.look(), label=name) for name, style in chart.legend.items()]
            figure.legend(handles=handles, loc="lower center", ncols=min(columns, len(handles)), frameon=False)
        write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160, metadata={"Software": None}))


def svg(panel: Panel, name: str) -> str:
    """A panel as the inside of an SVG of 72 pixels an inch, whose colours follow the page; ids begin with ``name``."""
    with settings(name):
        figure = figure_of(WIDTH, panel.height, "none")
        panel.draw(axes_of(figure, panel))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)  # it would style the whole page
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'\b(?:xlink:)?href="#', f'href="#{name}-', body).replace("url(#", f"url(#{name}-")
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var({variable})")
    return body


def plot_line(axes: Any, x: list[float], y: list[float], style: Style, every: int = 1) -> None:
    """Draw a mechanism's line; if there are many points, only some get markers."""
    axes.plot(x, y, **style.look(), markevery=every, markersize=4.5, zorder=3 if style.emphasised else 2)


def figure_of(width: float, height: float, paper: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=72, facecolor=paper)  # at 72 dpi a pixel is a point
    FigureCanvasAgg(figure)  # no global state, no display
    return figure


def axes_of(figure: Any, panel: Panel, x: float = 0.0, legend: float = 0.0) -> Any:
    """Axes with fixed margins: positions of labels are known before anything is drawn, and panels line up."""
    width, height = figure.get_size_inches()
    inner = WIDTH - panel.left - panel.right, panel.height - TOP - BOTTOM
    y = height - panel.height + BOTTOM if legend else BOTTOM
    axes = figure.add_axes(((x + panel.left) / width, y / height, inner[0] / width, inner[1] / height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return axes


def settings(salt: str) -> AbstractContextManager[None]:
    """Matplotlib's settings for one figure, restored afterwards: the SVG writer only reads global settings."""
    from matplotlib import rc_context

    return rc_context({"svg.hashsalt": salt}, Path(__file__).with_name("page.mplstyle"))
