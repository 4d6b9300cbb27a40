"""``linattn mechanisms``."""

from rich.console import Console


def mechanisms() -> None:
    """Show every registered mechanism and what it can do."""
    from linattn.lab.bench.catalog import mechanism_table

    Console().print(mechanism_table())
