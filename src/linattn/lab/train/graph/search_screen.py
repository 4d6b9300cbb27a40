"""The space search with its output for users."""

from rich.console import Console
from rich.text import Text

from linattn.lab.tasks.graph import load_graph, search_signature
from linattn.lab.tasks.graph.search import histogram
from linattn.support.options import OptionError


def search_on_screen(source: str, dimension: int, references: int, pairs: int, seed: int, console: Console) -> None:
    """Print the signature (q, p) = (time, space) that suits a graph, and the curvature that decided it."""
    for option, value, least in (("references", references, 1), ("pairs", pairs, 2)):
        if value < least:
            raise OptionError(option, f"must be an integer >= {least}, got {value}")
    if dimension < 4 or dimension % 2:
        raise OptionError("dimension", f"must be even and at least 4, got {dimension}")
    data = load_graph(source)
    try:
        found = search_signature(data, dimension=dimension, references=references, pairs=pairs, seed=seed)
    except ValueError as error:
        raise OptionError("data", f"{source}: {error}") from error
    lines = [
        f"{data.name}: {data.num_nodes:,} nodes, {data.num_edges // 2:,} edges",
        f"(q, p) = ({found.q}, {found.p})  time and space dimensions, {found.kind}",
        f"curvature of {len(found.curvature):,} nodes: mean {found.mean:+.3f}, spread {found.std:.3f}",
        *histogram(found.curvature),
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)
