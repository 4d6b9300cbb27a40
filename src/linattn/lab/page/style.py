"""One colour and one marker per mechanism, the same in every chart and table."""

import re
from dataclasses import dataclass, replace

REFERENCE = "softmax"  # the mechanism that others are compared with
# Okabe and Ito's colours, which are distinct to readers with colour blindness; mechanisms also differ in their markers.
# The second colour of each pair is for dark pages.
REFERENCE_COLOR = ("#444444", "#c9ced6")
COLORS = (
    ("#0072b2", "#4aa3e8"),
    ("#d55e00", "#f5853f"),
    ("#009e73", "#2fc397"),
    ("#cc79a7", "#e39ac4"),
    ("#e69f00", "#f3bd4b"),
    ("#56b4e9", "#a9dcfa"),
)
# The numbers of markers and colours have no common divisor: 66 mechanisms before a pair repeats.
MARKERS = ("o", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d")
REFERENCE_MARKER = "s"

# Colours of the page that charts share; the page's dark half replaces them.
INK, MUTED, RULE, PAPER = "#1d2127", "#5b636e", "#dfe2e6", "#fefefe"

# Outlines of the markers in a box of 12 x 12, for legends in the page.
OUTLINES = {
    "s": "M2 2h8v8h-8z",
    "o": "M6 1.5a4.5 4.5 0 1 0 .01 0z",
    "^": "M6 1.5l5 9h-10z",
    "v": "M6 10.5l5-9h-10z",
    "<": "M1.5 6l9-5v10z",
    ">": "M10.5 6l-9-5v10z",
    "D": "M6 .8l5.2 5.2-5.2 5.2-5.2-5.2z",
    "d": "M6 .8l3.4 5.2-3.4 5.2-3.4-5.2z",
    "P": "M4.3 1h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "X": "M3.4 1l2.6 2.6 2.6-2.6 2.4 2.4-2.6 2.6 2.6 2.6-2.4 2.4-2.6-2.6-2.6 2.6-2.4-2.4 2.6-2.6-2.6-2.6z",
    "p": "M6 1l5 3.7-1.9 6h-6.2l-1.9-6z",
    "h": "M6 .8l4.5 2.6v5.2l-4.5 2.6-4.5-2.6v-5.2z",
}


@dataclass(frozen=True)
class Style:
    """How one mechanism is drawn; ``variable`` is the colour's name in the page's style sheet.

    ``hollow``: an outlined marker and a dashed line, for a mechanism shown beside its own version without an extra
        part.
    """

    color: str
    dark: str
    marker: str
    variable: str
    emphasised: bool = False
    hollow: bool = False

    @property
    def face(self) -> str:
        """The fill colour of the marker."""
        return PAPER if self.hollow else self.color

    @property
    def line(self) -> str:
        return "--" if self.hollow else "-"


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
    own = _own_styles([name for name in names if plain[name] == name or plain[name] not in names])
    return {name: own[name] if name in own else replace(own[plain[name]], hollow=True) for name in names}


def _own_styles(names: list[str]) -> dict[str, Style]:
    found = {}
    others = 0
    for name in names:
        if name == REFERENCE:
            found[name] = Style(*REFERENCE_COLOR, REFERENCE_MARKER, "--series-0", True)
            continue
        light, dark = COLORS[others % len(COLORS)]
        variable = f"--series-{others % len(COLORS) + 1}"
        found[name] = Style(light, dark, MARKERS[others % len(MARKERS)], variable)
        others += 1
    return found


def color_variables() -> dict[str, str]:
    """Names in the page's style sheet of the colours in charts."""
    series = {light: f"--series-{i}" for i, (light, _) in enumerate((REFERENCE_COLOR, *COLORS))}
    return {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"} | series
