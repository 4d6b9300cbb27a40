"""Configs: types, limits and choices of options are checked wherever a value comes from, and decide the hash."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from linattn.support.config import Config, digest, option, parse_settings
from linattn.support.options import OptionError


@dataclass(frozen=True, kw_only=True)
class Budget(Config):
    steps: int = option(10, "Steps.", least=1)
    lr: float | None = option(None, "Rate.", above=0, most=1)
    device: str = option("cpu", "Device.", affects=False)


@dataclass(frozen=True, kw_only=True)
class Run(Budget):
    data: str = option(help="Data.", argument=True)
    mechanisms: tuple[str, ...] = option(("relu", "nala"), "Names.", choices=("relu", "nala", "pola"))
    sizes: tuple[int, ...] = option((), "Sizes.", least=4)
    kind: Literal["a", "b"] = option("a", "Kind.")
    flip: bool = option(False, "Flip.")
    output: Path | None = option(None, "Folder.", affects=False)
    set: dict[str, Any] = option({}, "Settings.")

    def check(self) -> None:
        if self.flip and self.kind == "b":
            raise OptionError("flip", "is not for kind b")


def test_texts_and_values_of_files_give_the_same_config():
    typed = Run.parse({
        "data": "d", "steps": "3", "lr": "0.5", "mechanisms": "pola,relu", "sizes": "4, 8", "flip": "yes",
        "output": "there", "set": ["a=1", "b.c=x"],
    })  # fmt: skip
    made = Run.parse({
        "data": "d", "steps": 3, "lr": 0.5, "mechanisms": ["pola", "relu"], "sizes": [4, 8], "flip": True,
        "output": "there", "set": {"a": 1, "b.c": "x"},
    })  # fmt: skip
    assert typed == made
    assert Run.parse(typed.values()) == typed
    assert Run.parse({"data": "d", "lr": "none"}).lr is None
    flips = [Run.parse({"data": "d", "flip": text}).flip for text in ("True", "yes", "1", "false", "no", "0")]
    assert flips == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("steps", "0", "at least 1, got 0"),
        ("steps", "1.5", "an integer, got '1.5'"),
        ("steps", True, "an integer, got True"),
        ("lr", "0", "at most 1 and above 0"),
        ("lr", "nan", "got nan"),
        ("lr", "2", "at most 1"),
        ("mechanisms", "relu,x", "one of relu, nala, pola, got 'x'"),
        ("sizes", "8,3", "at least 4, got 3"),
        ("kind", "c", "one of a, b"),
        ("flip", "maybe", "true or false, got 'maybe'"),
        ("set", ["a"], "key=value, got 'a'"),
        ("setps", "3", "is no option; there are data, "),
    ],
)
def test_a_wrong_value_names_its_option(name, value, said):
    with pytest.raises(OptionError, match=said) as raised:
        Run.parse({"data": "d", name: value})
    assert raised.value.option == name


def test_fields_that_do_not_go_together_and_changed_configs_are_checked():
    with pytest.raises(OptionError, match="not for kind b"):
        Run(data="d", flip=True, kind="b")
    with pytest.raises(OptionError, match="at least 1"):
        replace(Run(data="d"), steps=0)


def test_the_hash_depends_on_what_affects_results_alone():
    run = Run(data="d", set={"a": 1, "b": 2})
    same = replace(run, device="cuda", output=Path("there"), set={"b": 2, "a": 1})
    assert digest(run.values(affecting=True)) == digest(same.values(affecting=True))
    for change in ({"steps": 11}, {"set": {"a": 1}}, {"mechanisms": ("relu",)}, {"lr": 1e-3}):
        assert digest(replace(run, **change).values(affecting=True)) != digest(run.values(affecting=True))


def test_defaults_are_not_shared():
    first = Run(data="d")
    first.set["a"] = 1
    assert Run(data="d").set == {}


def test_settings_read_as_python_where_they_can():
    assert parse_settings("set", ["a=1", "b=[1, 2]", "c=None", "d=x=y", "e=1e-3"]) == {
        "a": 1, "b": [1, 2], "c": None, "d": "x=y", "e": 1e-3,
    }  # fmt: skip
