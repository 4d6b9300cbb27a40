"""The registry as a table."""

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from linattn.mechanisms.registry import MechanismInfo, list_mechanisms, mechanism_info


def mechanism_table() -> Table:
    table = Table(title="registered mechanisms", title_justify="left", box=SIMPLE_HEAD)
    for header in ("name", "mask", "cost", "state", "input x"):
        table.add_column(header, no_wrap=True)
    table.add_column("what it is")
    for name in list_mechanisms():
        info = mechanism_info(name)
        needs = "needed" if info.uses_input else ""
        text = f"{escape(info.summary.replace('``', ''))} [dim]({escape(info.paper)}, {info.year})[/]"
        table.add_row(name, _mask(info), info.cost, info.state, needs, text)
    return table


def _mask(info: MechanismInfo) -> str:
    if info.causal and info.bidirectional:
        return "both"
    return "causal" if info.causal else "bidirectional"
