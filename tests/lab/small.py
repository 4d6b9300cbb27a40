"""A small experiment for tests of what carries all of them."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linattn.lab.cases import Work
from linattn.lab.experiment import Experiment
from linattn.lab.page import Section
from linattn.lab.page.plots import Chart, Panel, plot_line, styles
from linattn.support.config import option
from linattn.support.options import OptionError


@dataclass(frozen=True, kw_only=True)
class Small(Experiment):
    """Square numbers, some of which go wrong.

    A second paragraph.
    """

    name = "small"
    numbers: tuple[int, ...] = option((1, 2, 3), "Numbers to square.", least=0, group="Numbers")
    mechanism: str = option("relu", "A name.", rare=True)
    log: str = option("", "A file in which each measurement leaves a line.", affects=False)
    seconds: float = option(0.0, "How long one takes.", least=0, affects=False)

    def cases(self) -> list[dict[str, Any]]:
        return [
            {"mechanism": self.mechanism, "number": number, "log": self.log, "seconds": self.seconds}
            for number in self.numbers
        ]

    @staticmethod
    def measure(case: Mapping[str, Any], work: Work) -> dict[str, Any]:
        number = case["number"]
        if case["log"]:
            with open(case["log"], "a") as file:
                file.write(f"{number}\n")
        if number == 13:
            raise ValueError("13 brings bad luck")
        if number == 99:
            raise OptionError("numbers", "99 is wrong for all")
        if number == 66:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(case["seconds"])
        work.tell(0.5, "half")
        return {"square": number**2, "history": [number, number**2]}

    def figures(self, frame: Any, meta: Mapping[str, Any]) -> list[Section]:
        def draw(axes: Any) -> None:
            plot_line(axes, list(frame["number"]), list(frame["square"]), styles(["relu"])["relu"])

        chart = Chart("squares", "Squares", "Higher is more.", [Panel(draw, "squares")], styles(["relu"]))
        return [
            Section("Numbers", "What <came> out.", table=frame[["number", "square"]]),
            Section("Chart", chart=chart),
        ]
