"""Imports point one way, as DESIGN.md says: its ``arrows`` block is read here, so the text and the code agree."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "linattn"
LEAVES = {"_version"}  # modules beside the folders that anyone may import
FOLDER = re.compile(r"^[a-z_]+$")


@dataclass(frozen=True)
class Arrows:
    """``allowed[folder]``: folders it may import; ``apart``: forms that do not know one another; ``lazy``: packages
    that no module imports at its top level, except those of the folders ``late``, which others import as late;
    ``together``: folders that may import one another."""

    allowed: dict[str, set[str]]
    apart: list[str]
    together: set[str]
    lazy: set[str]
    late: list[str]


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the file imports it too."""

    target: str
    line: int
    at_top: bool


def read_arrows(text: str) -> Arrows:
    (block,) = re.findall(r"^```arrows\n(.*?)^```", text, re.S | re.M)
    allowed: dict[str, set[str]] = {}
    lists: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, block.splitlines())):
        key, separator, names = re.match(r"(\w+)\s*(->|:)(.*)", line).groups()
        found = [name.strip() for name in names.split(",") if name.strip()]
        if separator == "->":
            allowed[key] = set(found)
        else:
            lists[key] = found
    return Arrows(allowed, lists["apart"], set(lists["together"]), set(lists["lazy"]), lists["late"])


def imports_of(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text()).body, True))


def _imports(nodes: list[ast.stmt], at_top: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from a import b` may name the module a.b: the longer name is checked, it starts with the shorter one.
            base = "." * node.level + (node.module or "")
            yield from (Import(f"{base}.{alias.name}", node.lineno, at_top) for alias in node.names)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            inside = inside or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            for part in ast.iter_child_nodes(node):  # handlers of try, cases of match
                if isinstance(part, ast.ExceptHandler | ast.match_case):
                    children += part.body
            yield from _imports(children, at_top and not inside)


def violations(source: Path, arrows: Arrows) -> list[str]:
    """Every import under ``source`` (the folder ``linattn``) that the arrows forbid."""
    mechanisms = {path.stem for path in (source / "mechanisms").glob("*.py") if registers(path)}
    found = []
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        for imported in imports_of(path):
            reason = _wrong(place, imported, arrows, mechanisms)
            if reason:
                found.append(f"{place.as_posix()}:{imported.line} imports {imported.target}: {reason}")
    return found


def registers(path: Path) -> bool:
    """Whether a file puts a mechanism into the registry."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    calls = [d.func for node in classes for d in node.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id == "register_mechanism" for call in calls)


def _wrong(place: Path, imported: Import, arrows: Arrows, mechanisms: set[str]) -> str:
    package, *parts = imported.target.split(".")
    if imported.target.startswith("."):
        return "relative imports hide where a name is from"
    inside = any(_under(place.as_posix(), late) for late in arrows.late)
    if package in arrows.lazy and imported.at_top and not inside:
        return f"{package} is imported where it is used, never at the top of a module"
    if any(_under("/".join(parts), late) for late in arrows.late) and imported.at_top and not inside:
        return "this folder is imported when it is needed, never at the top of a module"
    if package != PACKAGE or len(place.parts) == 1:
        return ""
    folder = place.parts[0]
    if folder not in arrows.allowed:
        return f"the folder {folder} has no line in DESIGN.md's arrows"
    target = parts[0] if parts else ""
    if target not in {folder, *LEAVES, *arrows.allowed[folder]}:
        allowed = ", ".join(sorted(arrows.allowed[folder])) or "nothing above itself"
        return f"{folder} may import {allowed}"
    own, other = (_form(path, arrows) for path in (place.with_suffix("").as_posix(), "/".join(parts)))
    if own and other and own != other:
        return f"{own} and {other} do not know one another"
    if folder == target == "mechanisms" and len(parts) > 1 and parts[1] in mechanisms - {place.stem}:
        return "a mechanism stands alone: what several share belongs in a file that registers nothing"
    return ""


def _form(path: str, arrows: Arrows) -> str:
    """The pattern under ``apart`` that a module's path fits, if any."""
    fitting = (form for form in arrows.apart if _under(f"{path}/", form))
    return next(fitting, "")


def _under(path: str, folder: str) -> bool:
    """Whether a path lies in a folder; ``*`` in its name is any one folder."""
    return re.match(folder.replace("*", "[^/]+") + "/", path) is not None


@pytest.fixture(scope="module")
def arrows() -> Arrows:
    return read_arrows((ROOT / "DESIGN.md").read_text())


def test_the_code_follows_the_arrows(arrows):
    assert not (wrong := violations(ROOT / "src" / PACKAGE, arrows)), "\n".join(wrong)


def test_every_folder_has_a_line_and_every_line_a_folder(arrows):
    folders = {path.parent.name for path in (ROOT / "src" / PACKAGE).glob("*/__init__.py")}
    assert folders == set(arrows.allowed)
    assert all(list((ROOT / "src" / PACKAGE).glob(f"{form}*")) for form in arrows.apart)


def test_the_arrows_have_no_cycle(arrows):
    """Sorted by what they may import, folders line up: nothing below imports anything above."""
    left = {
        folder: targets - (arrows.together if folder in arrows.together else set())
        for folder, targets in arrows.allowed.items()
    }
    while left:
        free = [folder for folder, targets in left.items() if not targets & left.keys()]
        assert free, f"these folders import one another in a circle: {', '.join(left)}"
        for folder in free:
            del left[folder]


WRONG = {
    "ops/linear/api.py": ("from linattn.mechanisms.base import Mechanism", "ops may import"),
    "ops/linear/reference.py": ("from linattn.ops.linear.chunked import scan", "do not know one another"),
    "ops/hybrid/recurrent.py": ("def f():\n    import linattn.ops.linear.chunked.scan", "do not know one another"),
    "ops/linear/chunked/scan.py": ("from linattn.kernels.linear import attend", "do not know one another"),
    "ops/linear/call.py": ("try:\n    pass\nexcept ImportError:\n    import triton", "where it is used"),
    "kernels/host.py": ("from linattn.kernels.causal.device.scan import scan", "when it is needed"),
    "mechanisms/a.py": ("from linattn.mechanisms.b import B\n\n\n@register_mechanism('a')\nclass A: ...", "alone"),
    "models/language/__init__.py": ("from linattn.models.language.hf.model import Model", "when it is needed"),
    "mechanisms/c.py": ("import timm.models", "where it is used"),
    "mechanisms/d.py": ("from linattn import create_mechanism", "mechanisms may import"),
    "convert/run.py": ("def f():\n    from linattn.lab.cli.main import app", "convert may import"),
    "lab/cli/main.py": ("from .bench import bench", "relative"),
    "elsewhere/a.py": ("from linattn.ops.linear.api import linear_attention", "has no line"),
}
RIGHT = {
    "kernels/causal/device/scan.py": "import triton",
    "models/language/hf/model.py": "import transformers",
    "kernels/launch.py": "def f():\n    from linattn.kernels.causal.device.scan import scan",
    "__init__.py": "from linattn.mechanisms.registry import create_mechanism",
    "ops/other.py": "def f():\n    import triton",
    "ops/shared/types.py": "if TYPE_CHECKING:\n    import triton",
    "ops/exponential/chunked.py": "from linattn.ops.linear.chunked.decay import NoDecay",
    "mechanisms/b.py": "from linattn.mechanisms.base import Mechanism\n\n\n@register_mechanism('b')\nclass B: ...",
    "mechanisms/base.py": "from linattn.ops.shared import call as checks",
    "lab/bench/store.py": "from linattn._version import __version__",
}


def test_wrong_imports_are_caught(tmp_path, arrows):
    for name, text in {**{name: text for name, (text, _) in WRONG.items()}, **RIGHT}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = {line.split(":", 1)[0]: line for line in violations(tmp_path, arrows)}
    assert found.keys() == WRONG.keys()
    assert all(words in found[name] for name, (_, words) in WRONG.items())
