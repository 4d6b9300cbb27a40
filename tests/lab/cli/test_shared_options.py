"""Options that commands share: read in their place, each into a field of its own."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from linattn.lab.cli.compare import app as compare_app
from linattn.lab.cli.shared_options import MachineOptions, takes_shared_options
from linattn.lab.cli.train import app as train_app
from linattn.lab.compare import compare
from linattn.lab.train import screen
from linattn.lab.train.recipes import configure, digits

# Every shared option of images with a value that is not the recipe's, and the field it ends in.
GIVEN = {
    "warmup_epochs": 0.5,
    "weight_decay": 0.3,
    "clip_norm": 2.0,
    "label_smoothing": 0.2,
    "ema_decay": 0.9,
    "mixup": 0.4,
    "cutmix": 0.6,
    "rand_augment": "m9-n2",
    "erasing": 0.1,
    "crop_padding": 1,
    "flip": True,
    "precision": "bf16",
    "compile": True,
    "graphs": True,
}


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


@pytest.mark.parametrize(
    ("app", "command", "missing"),
    [
        (train_app, "images", set()),
        (compare_app, "images", {"clip_norm", "label_smoothing", "erasing"}),
        (compare_app, "conversion", {"clip_norm", "label_smoothing", "erasing", "ema_decay"}),
    ],
)
def test_every_option_of_images_changes_its_own_field_alone(app, command, missing, monkeypatch):
    configs = []
    monkeypatch.setattr(screen, "train_on_screen", lambda job, _: configs.append(configure("digits", job.changes)) or 0)
    monkeypatch.setattr(compare, "compare", lambda config, _: configs.append(config.train) or 0)
    for name, value in GIVEN.items():
        option = f"--{name.replace('_', '-')}"
        words = [option] if value is True else [option, str(value)]
        result = CliRunner().invoke(app, [command, "--device", "cpu", *words])
        if name in missing:
            assert result.exit_code == 2, f"{command} has no {option}"
            continue
        assert result.exit_code == 0, result.output
        plain, changed = vars(digits()), vars(configs.pop())
        assert {key: changed[key] for key in changed if changed[key] != plain[key]} == {name: value}


def test_what_is_left_out_must_be_there():
    with pytest.raises(TypeError, match="no shared option of draw is 'depth'"):

        @takes_shared_options("width", "depth")
        def draw(shape: Shape) -> None: ...
