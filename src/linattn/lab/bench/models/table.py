"""A Markdown table of many backbones at every image size, beside their twins with softmax."""

from linattn.lab.bench.models.cases import SOFTMAX, backbone_case
from linattn.lab.bench.models.rows import ModelRow, ModelsResult


def backbones_table(result: ModelsResult, mode: str) -> str:
    """Models as rows, sizes as columns; a cell has images per second and peak GiB, each also relative to softmax.

    Parameters are counted at the smallest images, as learned positions grow with the plane.
    """
    cells: dict[tuple[str, str], dict[int, str]] = {}
    parameters: dict[tuple[str, str], dict[int, int]] = {}
    for row in result.rows:
        case = backbone_case(row.case)
        if case is None or row.mode != mode or row.mechanism == SOFTMAX:
            continue
        key = (case.size, row.mechanism)
        cells.setdefault(key, {})[case.pixels] = backbone_cell(result, row)
        if row.parameters is not None:
            parameters.setdefault(key, {})[case.pixels] = row.parameters
    sizes = sorted({pixels for own in cells.values() for pixels in own})
    lines = ["| " + " | ".join(["model", "mechanism", "parameters", *map(str, sizes)]) + " |"]
    lines.append("|---|---|---:|" + "---:|" * len(sizes))
    for key, own in cells.items():
        counts = parameters.get(key)
        count = f"{counts[min(counts)] / 1e6:.1f} M" if counts else ""
        names = [f"`{name}`" for name in key]
        lines.append("| " + " | ".join([*names, count, *(own.get(pixels, "") for pixels in sizes)]) + " |")
    return "\n".join(lines) + "\n"


def backbone_cell(result: ModelsResult, row: ModelRow) -> str:
    """``1,240/s (1.30x), 2.1 GiB (0.52x)``, or why there are no such numbers."""
    if row.status != "ok" or row.per_second is None:
        return row.status
    time, memory = result.over_softmax(row), result.memory_over_softmax(row)
    twin = result.find(row.case, SOFTMAX, row.mode)
    text = f"{row.per_second:,.0f}/s{_times(None if time is None else 1 / time)}"
    if row.peak_bytes:
        text += f", {row.peak_bytes / 2**30:.1f} GiB{_times(memory)}"
    return text + (f"; softmax: {twin.status}" if twin is not None and twin.status != "ok" else "")


def _times(share: float | None) -> str:
    return "" if share is None else f" ({share:.2f}x)"
