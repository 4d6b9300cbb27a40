"""Options that commands share: read in their place, each into a field of its own."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from linattn.lab.cli.shared_options import MachineOptions, takes_shared_options


@dataclass(kw_only=True)
class Shape:
    width: Annotated[int, typer.Option(help="Wide.")] = 2
    height: Annotated[int, typer.Option(help="High.")] = 3
    tags: Annotated[list[str], typer.Option(help="Words.")] = field(default_factory=list)


def test_shared_options_stand_where_their_argument_does_and_arrive_in_it():
    seen = []

    @takes_shared_options("height")
    def command(*, first: int = 0, shape: Shape, last: str = "") -> None:
        seen.append((first, shape, last))

    app = typer.Typer()
    app.command()(command)
    call = lambda *arguments: CliRunner().invoke(app, arguments, env={"TERM": "dumb"})  # noqa: E731
    text = call("--help").output
    assert text.index("--first") < text.index("--width") < text.index("--tags") < text.index("--last")
    assert "Wide." in text
    assert call().exit_code == 0
    assert call("--width", "7", "--tags", "a", "--tags", "b", "--last", "z", "--first", "1").exit_code == 0
    assert seen == [(0, Shape(), ""), (1, Shape(width=7, tags=["a", "b"]), "z")]
    assert call("--height", "4").exit_code == 2, "a shared option that the command has not"


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        ("cpu", {}, ("cpu", "fp32", False)),
        ("cuda:1", {}, ("cuda:1", "bf16", True)),
        ("cuda", {"precision": "fp32", "compile": False}, ("cuda", "fp32", False)),
        ("cpu", {"precision": "bf16", "compile": True}, ("cpu", "bf16", True)),
    ],
)
def test_what_is_not_given_is_decided_by_the_device(device, given, found):
    changes = MachineOptions(device=device, **given).changes()
    assert (changes["device"], changes["precision"], changes["compile"]) == found
    assert changes["graphs"] is None, "the recipe's"


def test_what_is_left_out_must_be_there():
    with pytest.raises(TypeError, match="no shared option of draw is 'depth'"):

        @takes_shared_options("width", "depth")
        def draw(shape: Shape) -> None: ...
