"""Every public function and every mechanism shows an example, and the examples run."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest

import linattn

FUNCTIONS = {name: getattr(linattn, name) for name in linattn.__all__ if callable(getattr(linattn, name))}
MECHANISMS = {f"mechanism {name}": linattn.mechanism_info(name).cls for name in linattn.list_mechanisms()}
EXAMPLES = FUNCTIONS | MECHANISMS
MODULES = [m.name for m in pkgutil.walk_packages(linattn.__path__, "linattn.") if ".cli" not in m.name]


def run_examples(name: str, thing: Callable) -> tuple[int, str]:
    """How many lines of examples ``thing`` has itself, and what failed in them; a method's count too."""
    problems: list[str] = []
    runner = doctest.DocTestRunner()
    module = inspect.getmodule(thing)
    tests = doctest.DocTestFinder().find(thing, name, module=module)
    for test in tests:
        runner.run(test, out=problems.append)
    return sum(len(test.examples) for test in tests if test.name == name), "".join(problems)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_there_and_runs(name):
    count, problems = run_examples(name, EXAMPLES[name])
    assert count, f"{name} has no example: give its docstring an `Example:` part with `>>>` lines"
    assert not problems, problems


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_modules_run(name):
    module = importlib.import_module(name)
    problems: list[str] = []
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module, name):
        runner.run(test, out=problems.append)
    assert not problems, "".join(problems)


def test_missing_and_wrong_examples_are_caught():
    def bare() -> None:
        """Nothing to see."""

    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    assert run_examples("bare", bare) == (0, "")
    count, problems = run_examples("wrong", wrong)
    assert count == 1
    assert "Expected:\n    3" in problems
