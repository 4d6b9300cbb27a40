"""Describes what was compared, and how the results were made."""

from typing import Any

from linattn.lab.page.markup import Markup
from linattn.lab.page.numbers import counted, listed
from linattn.lab.pages.details import fold
from linattn.lab.pages.frame import made_section, pairs
from linattn.lab.pages.read import Comparison, number


def setting_sentence(comparison: Comparison) -> str:
    """Data, host, budget and device in one sentence; what is not known is left out."""
    data, host, train = (comparison.part(part) for part in ("data", "host", "train"))
    sizes = _size(data) if comparison.words.unit == "images" else ""  # sizes of the parts of a text are shares of it
    words = [f"{listed(comparison.names) if comparison.names else 'No mechanism'}"]
    words.append(f"in one {_host(host)} on {data.get('name') or 'unnamed data'}{sizes}")
    count = comparison.words.round
    if number(train.get(f"{count}s")) is not None:
        words.append(f"for {counted(int(train[f'{count}s']), count)}")
    seeds = comparison.meta.get("seeds")
    if seeds:
        words.append(f"with {counted(len(seeds), 'seed')} ({', '.join(map(str, seeds))})")
    if comparison.meta.get("device"):
        words.append(f"on {comparison.meta['device']}")
    first, *rest = words
    return f"{first} {', '.join(rest)}."


def _host(host: dict[str, Any]) -> str:
    size = f" of size {host['size']}" if host.get("size") else ""
    tokens = number(host.get("tokens"))
    return f"host{size}{f' with {tokens:,.0f} tokens' if tokens else ''}"


def _size(data: dict[str, Any]) -> str:
    words = []
    for part in ("train", "test"):
        count = number(data.get(part))
        if count is not None:
            words.append(f"{count:,.0f} {'training' if part == 'train' else 'test'} images")
    size = data.get("image_size")
    if size:
        words.append(f"{' × '.join(map(str, size))} pixels")
    if data.get("classes"):
        words.append(counted(len(data["classes"]), "class").replace("classs", "classes"))
    return f" ({', '.join(words)})" if words else ""


def how_it_was_made(comparison: Comparison) -> Markup:
    """The command, the machine and every setting."""
    meta = comparison.meta
    seeds = {key: meta[key] for key in ("seeds", "lrs") if meta.get(key)}
    parts = [
        fold(title, pairs(values))
        for title, values in (
            ("Training settings", comparison.part("train") | seeds),
            ("Host", comparison.part("host")),
            ("Data", comparison.part("data")),
        )
        if values
    ]
    return made_section(meta, *parts)
