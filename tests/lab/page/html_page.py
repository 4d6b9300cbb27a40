"""A page taken apart by the standard library's parser."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "wbr"}


@dataclass
class Node:
    name: str
    attributes: dict[str, str]
    children: list["Node"] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def find(self, name: str, **attributes: str) -> list["Node"]:
        """Every node of that name inside, in order; ``class_`` stands for ``class``."""
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        own = [self] if self.name == name and wanted.items() <= self.attributes.items() else []
        return own + [found for child in self.children for found in child.find(name, **attributes)]

    def nodes(self) -> list["Node"]:
        return [self, *(found for child in self.children for found in child.nodes())]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack = [Node("", {})]

    def handle_starttag(self, tag, attrs):
        node = Node(tag, {key: value or "" for key, value in attrs})
        self.stack[-1].children.append(node)
        if tag not in VOID:
            self.stack.append(node)

    def handle_startendtag(self, tag, attrs):
        self.stack[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop().name == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        for node in self.stack:
            node.words.append(data)


def parse(text: str) -> Node:
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert len(parser.stack) == 1, f"<{parser.stack[-1].name}> is never closed"
    return parser.stack[0]


def table_of(page: Node, label: str) -> dict[str, dict[str, str]]:
    """Row header -> column title (without its unit) -> text, of the table in the box with that label."""
    (box,) = page.find("div", aria_label=label)
    titles = [(cell.find("span") or [cell])[0].text for cell in box.find("thead")[0].find("th")]
    rows = {}
    for row in box.find("tbody")[0].find("tr"):
        head = row.find("th")[0]
        rows[head.attributes["data-value"]] = dict(
            zip(titles, [head.text, *(c.text for c in row.find("td"))], strict=True)
        )
    return rows
