"""A hook of mkdocs: fills pages from the registry and from DESIGN.md, so that nothing is written twice."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from linattn.mechanisms.registry import list_mechanisms, markdown_table, mechanism_info

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r'<!-- include: (\S+) "(.+?)" -->')
MECHANISMS = "<!-- mechanisms -->"


def on_files(files: Any, config: Any) -> Any:
    """Charts of results lie outside of the pages' folder, where the repository's own view of a page finds them."""
    for path in sorted((ROOT / "results").glob("*/*.png")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    markdown = markdown.replace("](../results/", "](results/")
    markdown = INCLUDE.sub(lambda found: section((ROOT / found[1]).read_text(), found[2]), markdown)
    return markdown.replace(MECHANISMS, mechanisms_text()) if MECHANISMS in markdown else markdown


def section(text: str, heading: str) -> str:
    """What stands under a second-level heading, up to the next one."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    if found is None:
        raise ValueError(f"there is no heading {heading!r} to include")
    return found[1].strip()


def mechanisms_text() -> str:
    """The table, and each class with its docstring."""
    parts = [markdown_table()]
    for info in map(mechanism_info, list_mechanisms()):
        path = f"{info.cls.__module__}.{info.cls.__qualname__}"
        options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n      members: []"
        parts.append(f"## {info.name}\n\n::: {path}\n{options}\n")
    return "\n".join(parts)
