"""pytest's side of tools/test_gpu.py: one of several processes that share the tests, group by group.

All processes collect the same tests and sort them into the same groups: those of one group meet the same kernels, so
that each kernel is compiled by one process, and found in the cache by what comes later. Who makes a group's file in the
shared folder first has the group. What happens is written to a pipe, one line of JSON each.
"""

import json
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

# After these a process can use its GPU no more: every later call fails, whatever it is.
LOST = re.compile(
    r"illegal memory access|unspecified launch failure|misaligned address|device-side assert|illegal instr"
)
LONGEST = 40.0  # seconds that a group may take, about, where nothing says what its tests share
LAST_LINES = 40


class Part:
    """Takes groups until none is left, or the time is up."""

    def __init__(self, index: int, folder: Path, pipe: int, deadline: float, passed: Path) -> None:
        self.index, self.folder, self.pipe, self.deadline = index, folder, pipe, deadline
        self.passed = set(passed.read_text().splitlines())
        self.groups: dict[str, list[pytest.Item]] = {}
        self.lost = False
        started = folder / f"started-{index}"
        self.before = set(started.read_text().splitlines()) if started.exists() else set()
        self.started = started.open("a")

    def say(self, kind: str, **more: Any) -> None:
        os.write(self.pipe, (json.dumps({"kind": kind, **more}) + "\n").encode())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        left = [item for item in items if item.nodeid not in self.passed]
        for item in left:
            groups[group_of(item)].append(item)
        # The longest first: what is left at the end fills gaps.
        self.groups = dict(sorted(_cut(groups).items(), key=lambda named: -sum(map(cost, named[1]))))
        self.say("collected", tests=[item.nodeid for item in left], passed=len(items) - len(left))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Files that could not be collected were told; the others' tests run all the same."""
        for number, tests in enumerate(self.groups.values()):
            if self._mine(number):
                self._run([item for item in tests if item.nodeid not in self.before])
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # the others need room too
        return True

    def _mine(self, number: int) -> bool:
        """Taken now, or by the process whose place this one took."""
        place = self.folder / f"group-{number}"
        try:
            with place.open("x") as file:
                file.write(str(self.index))
        except FileExistsError:
            return place.read_text() == str(self.index)
        return True

    def _run(self, tests: list[pytest.Item]) -> None:
        for item, following in zip(tests, [*tests[1:], None], strict=False):
            if time.time() > self.deadline:
                return
            self.started.write(f"{item.nodeid}\n")
            self.started.flush()
            self.say("start", test=item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.lost:
                # Whatever this process did now would fail; even its end might hang.
                self.say("lost", test=item.nodeid)
                os._exit(1)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Waits, so that what a kernel did wrong is said of the test that launched it."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = "\n".join(str(report.longrepr).splitlines()[-LAST_LINES:]) if report.failed else ""
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        self.lost = self.lost or bool(report.failed and (LOST.search(str(report.longrepr)) or _gone()))
        self.say(
            "report", test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration, text=text
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say("uncollected", test=report.nodeid, text=str(report.longrepr))


def _gone() -> bool:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def group_of(item: pytest.Item) -> str:
    """What the kernels of a test depend on: its mechanism, or the options that kernels are compiled for."""
    arguments = getattr(getattr(item, "callspec", None), "params", {})
    if "variant" in arguments:
        v = arguments["variant"]
        return f"op, causal {v.causal}, decay {v.decay}, normalizer {v.normalizer}, own features {v.norm_features}"
    if "contracts" in item.path.parts:
        return f"mechanism {arguments.get('name')}"
    return item.nodeid.partition("[")[0]


def _cut(groups: dict[str, list[pytest.Item]]) -> dict[str, list[pytest.Item]]:
    """Groups that are known by their function alone, in parts."""
    found: dict[str, list[pytest.Item]] = {}
    for name, items in groups.items():
        size = max(1, int(LONGEST / max(map(cost, items)))) if "::" in name else len(items)
        found |= {f"{name} {n}": items[n : n + size] for n in range(0, len(items), size)}
    return found


def cost(item: pytest.Item) -> float:
    """About how many seconds, with compilation; only how groups are cut and ordered depends on it."""
    if "compiled_blocks" in item.name or "cuda_records" in item.name:
        return 30.0
    if "test_compile" in item.nodeid:
        return 6.0
    if "contracts" in item.path.parts:
        return 1.0
    return 8.0 if item.get_closest_marker("gpu") and "large" in item.name else 4.0


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        settings = json.loads(os.environ["LINATTN_TEST_PART"])
        config.pluginmanager.register(Part(**settings | {name: Path(settings[name]) for name in ("folder", "passed")}))
