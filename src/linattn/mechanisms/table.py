"""The registry as a table: the tables of the README and of the command line have the same rows."""

from linattn.mechanisms.registry import list_mechanisms, mechanism_info

COLUMNS = ("mechanism", "what it is", "paper", "causal", "bidirectional", "state", "cost")


def mechanism_rows() -> list[tuple[str, ...]]:
    """One row of plain text per mechanism, in the order of ``COLUMNS``, sorted by name.

    Example:
        >>> from linattn.mechanisms.table import COLUMNS, mechanism_rows
        >>> rows = {row[0]: dict(zip(COLUMNS, row)) for row in mechanism_rows()}
        >>> rows["elu"]["paper"], rows["softmax"]["cost"]
        ('arXiv:2006.16236 (2020)', 'quadratic')
    """
    rows: list[tuple[str, ...]] = []
    for info in map(mechanism_info, list_mechanisms()):
        summary = info.summary + (" (needs x)" if info.uses_input else "")
        paper = f"{info.paper} ({info.year})"
        rows.append((info.name, summary, paper, _mark(info.causal), _mark(info.bidirectional), info.state, info.cost))
    return rows


def markdown_table() -> str:
    """The table in Markdown, with links to the papers."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, summary, paper, *rest in mechanism_rows():
        cells = (f"`{name}`", summary.replace("``", "`").replace("|", "\\|"), _link(paper), *rest)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mark(supported: bool) -> str:
    return "yes" if supported else "no"


def _link(paper: str) -> str:
    source, _, year = paper.partition(" ")
    if not source.startswith("arXiv:"):
        return paper
    return f"[{source}](https://arxiv.org/abs/{source.removeprefix('arXiv:')}) {year}"
