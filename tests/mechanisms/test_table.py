import doctest
import importlib
import pkgutil

import pytest

import linattn
import linattn.mechanisms
from linattn.mechanisms.table import COLUMNS, markdown_table, mechanism_rows

MODULES = [module.name for module in pkgutil.iter_modules(linattn.mechanisms.__path__)]


def test_rows_are_the_registry():
    rows = mechanism_rows()
    assert [row[0] for row in rows] == linattn.list_mechanisms()
    assert all(len(row) == len(COLUMNS) and all(row) for row in rows)
    by_name = {row[0]: row for row in rows}
    assert by_name["softmax"][2:] == ("arXiv:1706.03762 (2017)", "yes", "yes", "growing", "quadratic")
    assert by_name["gated"][1].endswith("(needs x)")


def test_markdown():
    lines = markdown_table().splitlines()
    assert len(lines) == 2 + len(linattn.list_mechanisms())
    assert all(line.replace("\\|", "").count("|") == len(COLUMNS) + 1 for line in lines)
    (elu,) = (line for line in lines if line.startswith("| `elu` |"))
    assert "`elu(x) + 1`" in elu
    assert "[arXiv:2006.16236](https://arxiv.org/abs/2006.16236) (2020)" in elu


@pytest.mark.parametrize("name", linattn.list_mechanisms())
def test_every_mechanism_has_an_example(name):
    module = importlib.import_module(linattn.mechanism_info(name).cls.__module__)
    assert ">>>" in (linattn.mechanism_info(name).cls.__doc__ or "")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"linattn.mechanisms.{name}")).failed == 0
