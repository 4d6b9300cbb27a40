"""``linattn report``: the page of results again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.lab.command import load
from linattn.lab.commands import COMMANDS
from linattn.lab.experiment import RIGHT, load_results
from linattn.lab.screen import Screen
from linattn.support.config import Config, option
from linattn.support.extras import need
from linattn.support.options import OptionError


@dataclass(frozen=True, kw_only=True)
class Report(Config):
    """Draw the charts and write the page of a comparison again, from the results in its folder.

    Exit code: 0 all right, 2 a folder without results or a package that is missing.
    """

    folder: Path = option(Path(), "Folder with results.json, and examples.json if any.", argument=True)

    def run(self, screen: Screen) -> int:
        need("the page's charts", "matplotlib")
        results = self._results()
        experiment: Any = load(results["meta"]["experiment"])
        config = experiment.parse({**results["meta"].get("config", {}), "output": self.folder})
        screen.say(f"page: {config.write_page(results['meta'], results['rows'])}")
        return RIGHT

    def _results(self) -> dict[str, Any]:
        path = self.folder / "results.json"
        if not path.is_file():
            raise OptionError("folder", f"must hold the results.json of a comparison; there is none in {self.folder}")
        try:
            results = load_results(path)
        except ValueError as error:
            raise OptionError("folder", f"{path} is not JSON: {error}") from error
        whole = isinstance(results, Mapping) and {"meta", "rows"} <= results.keys()
        if not whole or results["meta"].get("experiment") not in COMMANDS:
            known = json.dumps(sorted(COMMANDS))
            raise OptionError("folder", f"{path} is not the result of one of {known}: it needs meta and rows")
        return results
