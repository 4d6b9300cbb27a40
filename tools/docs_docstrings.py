"""An extension of griffe, which reads docstrings for mkdocstrings: our docstrings as its Google style expects them."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|data|mod):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """``Example:`` opens a part of its own, and roles become plain code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = ROLE.sub(r"`\1`", text)
