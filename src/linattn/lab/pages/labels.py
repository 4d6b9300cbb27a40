"""Places names beside points so that they cover as little as possible."""

from dataclasses import dataclass
from math import hypot
from typing import Any

FONT = 8.5
MARK = 5.0  # half the width of a marker's box, in points


@dataclass(frozen=True)
class Box:
    left: float
    bottom: float
    right: float
    top: float

    def shared(self, other: "Box") -> float:
        """The area that both boxes cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def place_labels(names: list[str], points: list[tuple[float, float]], taken: list[Box], frame: Box) -> list[Box]:
    """A box for each name near its point, in points of 1/72 inch.

    Points are served greedily, the most crowded first. Each takes, of 48 places around it, the one that covers least of
    other labels, of ``taken`` (markers, bars) and of the area outside ``frame``; among equals the nearest.

    Example:
        >>> boxes = place_labels(["a", "b"], [(50, 50), (52, 50)], [], Box(0, 0, 100, 100))
        >>> boxes[0].shared(boxes[1])
        0.0
    """
    taken = [*taken, *(Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in points)]

    def crowd(i: int) -> float:
        x, y = points[i]
        return sum(1 / (5 + hypot(x - a, y - b)) for a, b in points)

    placed: dict[int, Box] = {}
    for i in sorted(range(len(names)), key=crowd, reverse=True):
        choices = list(enumerate(_around(names[i], *points[i])))
        obstacles = [*taken, *placed.values()]

        def cost(choice: tuple[int, Box], obstacles: list[Box] = obstacles) -> float:
            rank, box = choice
            outside = box.area - box.shared(frame)
            return sum(box.shared(other) for other in obstacles) + 10 * outside + 0.1 * rank

        placed[i] = min(choices, key=cost)[1]
    return [placed[i] for i in range(len(names))]


def _around(name: str, x: float, y: float) -> list[Box]:
    """Places from near to far: right, left, above, below, and the corners between."""
    width, height = 0.6 * FONT * len(name) + 2, 1.25 * FONT
    found = []
    for gap in (7.5, 12.0, 18.0, 26.0, 36.0, 48.0):
        near = gap * 0.7
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            step = near if dx and dy else gap
            cx = x + dx * (step + width / 2)
            cy = y + dy * (step + height / 2)
            found.append(Box(cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2))
    return found


def draw_labels(axes: Any, names: list[str], data: list[tuple[float, float]], bars: list[Box], bold: set[str]) -> None:
    """Write the names into ``axes``, whose limits are final; a thin line leads to names that had to move away."""
    points = [tuple(axes.transData.transform(point)) for point in data]
    edges = axes.get_window_extent()
    frame = Box(edges.x0, edges.y0, edges.x1, edges.y1)
    for name, point, box in zip(names, points, place_labels(names, points, bars, frame), strict=True):
        # Anchored at the side next to the point: with another font the text then grows away from it.
        side, x = ("left", box.left) if box.left > point[0] else ("right", box.right)
        if box.left <= point[0] <= box.right:
            side, x = "center", (box.left + box.right) / 2
        far = _gap(box, point) > 10
        axes.annotate(
            name,
            data[names.index(name)],
            (x - point[0], (box.bottom + box.top) / 2 - point[1]),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=FONT,
            fontweight="bold" if name in bold else "normal",
            arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": "#5b636e", "shrinkB": 4} if far else None,
            zorder=5,
        )


def _gap(box: Box, point: tuple[float, float]) -> float:
    dx = max(box.left - point[0], point[0] - box.right, 0.0)
    dy = max(box.bottom - point[1], point[1] - box.top, 0.0)
    return hypot(dx, dy)
