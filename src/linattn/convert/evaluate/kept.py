"""Keeps measured figures, each written to a file as soon as it is known."""

from collections.abc import Callable
from json import loads
from pathlib import Path
from typing import Any

from linattn.support.files import write_json


class Kept:
    """Figures of finished stages, and the single figures of unfinished ones.

    Args:
        path: JSON file; None: nothing is written.
        fingerprint: what the figures depend on; a file with another fingerprint is started anew.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.stages: dict[str, Any] = {}
        self.figures: dict[str, Any] = {}
        kept = loads(path.read_text()) if path is not None and path.is_file() else {}
        if kept.get("fingerprint") == fingerprint:
            self.stages, self.figures = kept["stages"], kept.get("figures", {})

    def keep(self, stage: str, figures: dict[str, Any]) -> None:
        """Keep all figures of a stage."""
        self.stages[stage] = figures
        self._write()

    def figure(self, stage: str, name: str, measure: Callable[[], Any]) -> Any:
        """One figure, ready for JSON; measured if it is not kept yet. NaN and infinity are text in a file."""
        key = f"{stage}: {name}"
        if key not in self.figures:
            self.figures[key] = measure()
            self._write()
        return self.figures[key]

    def _write(self) -> None:
        if self.path is not None:
            kept = {"fingerprint": self.fingerprint, "stages": self.stages, "figures": self.figures}
            write_json(self.path, kept)
