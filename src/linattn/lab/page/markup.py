"""HTML from Python: text is escaped unless it is markup already."""

from html import escape


class Markup(str):
    """Text that is HTML already; any other text is escaped."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | bool | None) -> Markup:
    """``<name attribute="...">children</name>``; ``class_`` and ``aria_label`` stand for ``class`` and ``aria-label``.

    Example:
        >>> element("p", "a < b, ", element("b", "c"), class_="note", hidden=False)
        '<p class="note">a &lt; b, <b>c</b></p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(str(value))}"')
    start = Markup(f"<{' '.join(words)}>")
    return start if name in ("img", "meta", "wbr") else Markup(f"{start}{join(*children)}</{name}>")


def unbroken(text: str) -> str:
    """Keep ``97.1 %`` and ``top-1`` on one line, by a space and a dash that do not break."""
    return text.replace(" %", "\u00a0%").replace("top-1", "top\u20111")


def join(*parts: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))
