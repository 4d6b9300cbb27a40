"""`linattn doctor`: what is installed, and what would be chosen here."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version

import torch

from linattn._version import __version__
from linattn.lab.screen import Screen
from linattn.ops.explain import explain
from linattn.support.config import Config
from linattn.support.machine import cpu_name


@dataclass(frozen=True, kw_only=True)
class Doctor(Config):
    """Show versions, devices, what each extra brings and lacks here, and what impl="auto" would choose."""

    def run(self, screen: Screen) -> int:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        rows = [
            ("linattn", __version__), ("python", platform.python_version()), ("torch", torch.__version__),
            ("triton", installed("triton") or "not installed"),
            ("cpu", f"{cpu_name()}, {torch.get_num_threads()} threads"), ("gpu", ", ".join(gpus) or "none"),
        ]  # fmt: skip
        for extra, packages in extras().items():
            missing = [name for name in packages if not installed(name)]
            lacks = f"missing {', '.join(missing)}: pip install 'linattn[{extra}]'"
            rows.append((f"extra {extra}", lacks if missing else "installed"))
        for device in ("cpu", "cuda") if gpus else ("cpu",):
            q = torch.zeros(1, 1, 2, 8, device=device)
            rows.append((f"auto on {device}", str(explain(q, q, q, causal=True))))
        screen.table("linattn doctor", ["what", "here"], rows)
        screen.result(dict(rows))
        return 0


def installed(package: str) -> str:
    """The version of a package; empty if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def extras() -> dict[str, list[str]]:
    """The packages of each extra, as the metadata of the installed library lists them."""
    names = distribution("linattn").metadata.get_all("Provides-Extra") or []
    found: dict[str, list[str]] = {name: [] for name in names}
    for requirement in requires("linattn") or []:
        package = re.split(r"[\s\[<>=!~;(]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        if extra and package != "linattn":
            found.setdefault(extra.group(1), []).append(package)
    return {name: packages for name, packages in found.items() if packages}
