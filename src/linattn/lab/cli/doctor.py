"""``linattn doctor``."""

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from linattn._version import __version__

# What each extra brings, by the module that shows it is there.
EXTRAS = {"hf": "transformers", "report": "matplotlib", "docs": "mkdocs", "dev": "pytest"}


def doctor() -> None:
    """Show versions, devices, the extras that are installed, and what impl="auto" would choose here."""
    import torch

    from linattn.ops.explain import explain
    from linattn.support.machine import cpu_name

    table = Table(show_header=False, box=None)
    table.add_row("linattn", __version__)
    table.add_row("python", platform.python_version())
    table.add_row("torch", torch.__version__)
    table.add_row("triton", _version("triton"))
    table.add_row("cpu", f"{cpu_name()}, {torch.get_num_threads()} threads")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table.add_row("gpu", ", ".join(names) or "none")
    for extra, module in EXTRAS.items():
        there = find_spec(module) is not None
        table.add_row(f"extra {extra}", "installed" if there else f"missing: pip install 'linattn\\[{extra}]'")
    for device in ("cpu", "cuda") if names else ("cpu",):
        q = torch.zeros(1, 1, 2, 8, device=device)
        table.add_row(f"auto on {device}", str(explain(q, q, q, causal=True)))
    Console().print(table)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
