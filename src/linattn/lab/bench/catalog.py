"""The table of registered mechanisms for the terminal."""

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from linattn.mechanisms.registry import COLUMNS, mechanism_rows

TITLE = "registered mechanisms (c: causal, b: bidirectional, state: what decoding keeps)"


def mechanism_table() -> Table:
    """The table, with narrow columns first, so that the text has room in a window of 80 characters."""
    table = Table(title=TITLE, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("mechanism", "c", "b", "state"):
        table.add_column(header, no_wrap=True)
    table.add_column("what it is")
    for values in mechanism_rows():
        row = dict(zip(COLUMNS, values, strict=True))
        slow = "" if row["cost"] == "linear" else f", {row['cost']}"
        text = f"{escape(row['what it is'].replace('``', ''))} [dim]{escape(row['paper'])}{slow}[/]"
        marks = ("x" if row[mask] == "yes" else "" for mask in ("causal", "bidirectional"))
        table.add_row(row["mechanism"], *marks, row["state"], text)
    return table
