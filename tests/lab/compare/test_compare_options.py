"""Options of mechanisms in a comparison on images: they arrive, are told, and keep runs apart."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from tests.lab.compare.small_comparison import HOST, TRAIN, config_for, results_of, run
from typer.testing import CliRunner

from linattn.lab.cli.main import app
from linattn.lab.compare import runner
from linattn.lab.compare.compare import compare
from linattn.lab.compare.host import create_host
from linattn.lab.compare.images import Images
from linattn.lab.compare.settings import HostConfig
from linattn.lab.tasks import load_images
from linattn.support.options import OptionError

pytestmark = pytest.mark.usefixtures("few_images")

ALPHA = replace(HOST, options={"pola": {"alpha": 2.0}})


def test_options_are_trained_with_told_and_kept_apart(tmp_path, monkeypatch):
    config = config_for(
        tmp_path / "c", mechanisms=("relu", "pola"), host=ALPHA, seeds=1, train=replace(TRAIN, epochs=1)
    )
    code, text = run(config)
    assert code == 0
    assert "pola alpha=2.0" in text
    relu, pola = results_of(config)["mechanisms"]
    assert "options" not in relu
    assert pola["options"] == {"alpha": 2.0}
    assert results_of(config)["meta"]["host"]["options"] == {"pola": {"alpha": 2.0}}
    assert "alpha=2.0" in (config.output / "results.csv").read_text()
    assert "<small>alpha=2.0</small>" in (config.output / "report.html").read_text()
    stored = json.loads((config.output / "runs/pola/lr-0.003-seed-0/result.json").read_text())
    assert stored["fingerprint"]["options"] == {"alpha": 2.0}

    monkeypatch.setattr(runner, "create_batches", lambda *_: pytest.fail("nothing is left to train"))
    for host in (HOST, replace(HOST, options={"pola": {"alpha": 3.0}})):
        with pytest.raises(OptionError, match=r"output: .*options was \{'pola': \{'alpha': 2.0\}\}, now"):
            compare(replace(config, host=host), Console(file=StringIO()))


def test_folders_from_before_there_were_options_go_on(tmp_path):
    config = config_for(tmp_path / "c", mechanisms=("pola",), seeds=1, train=replace(TRAIN, epochs=1))
    run(config)
    path, result = config.output / "settings.json", config.output / "runs/pola/lr-0.003-seed-0/result.json"
    settings = json.loads(path.read_text())
    del settings["options"]
    path.write_text(json.dumps(settings))
    assert "options" not in json.loads(result.read_text())["fingerprint"]
    before = result.stat().st_mtime_ns
    assert run(replace(config, mechanisms=("pola", "relu")))[0] == 0
    assert result.stat().st_mtime_ns == before
    with pytest.raises(OptionError, match="options was None, now"):
        compare(replace(config, host=ALPHA), Console(file=StringIO()))


def test_a_mechanism_joins_a_folder_with_its_options(tmp_path):
    config = config_for(tmp_path / "c", mechanisms=("pola",), host=ALPHA, seeds=1, train=replace(TRAIN, epochs=1))
    run(config)
    both = replace(HOST, options={"nala": {"power": 2.0}, **ALPHA.options})
    assert run(replace(config, mechanisms=("pola", "nala"), host=both))[0] == 0
    results = {path: path.stat().st_mtime_ns for path in config.output.glob("runs/*/*/result.json")}
    assert len(results) == 2
    # one that is left out keeps what it had
    only = replace(HOST, options={"nala": {"power": 2.0}})
    assert run(replace(config, mechanisms=("nala",), host=only))[0] == 0
    assert json.loads((config.output / "settings.json").read_text())["options"] == both.options
    assert run(replace(config, host=ALPHA))[0] == 0
    assert {path: path.stat().st_mtime_ns for path in results} == results, "nothing was trained again"
    for name in ("pola", "nala"):
        with pytest.raises(OptionError, match="options was"):
            compare(replace(config, mechanisms=(name,), host=HOST), Console(file=StringIO()))


def test_costs_that_an_earlier_version_measured_stay(tmp_path, monkeypatch):
    """It did not know the loss of energy, which is not timed."""
    config = config_for(tmp_path / "c", mechanisms=("pola",), seeds=1, train=replace(TRAIN, epochs=1))
    run(config)
    (path,) = (config.output / "costs").iterdir()
    assert "energy_loss" not in json.loads(path.read_text())["key"]
    monkeypatch.setattr(Images, "costs", lambda *_: pytest.fail("measured already"))
    assert run(config)[0] == 0


def test_options_reach_the_mechanism_of_either_host():
    data = load_images("digits")
    pola = create_host("pola", replace(ALPHA, local="channel"), data, 0).blocks[0].attn
    assert (pola.mechanism.alpha, pola.options.local) == (2.0, "channel")
    every = HostConfig("digits", depth=1, options={"": {"form": "normalized"}})
    assert create_host("quadratic", every, data, 0).blocks[0].attn.mechanism.form == "normalized"
    pyramid = HostConfig("xt", family="pyramid", options=ALPHA.options)
    stages = create_host("pola", pyramid, data, 0).stages
    assert [getattr(stage.blocks[0].attn.mechanism, "alpha", None) for stage in stages] == [2.0, 2.0, None, None]


@pytest.mark.parametrize("host", [["--preset", "nala"], ["--host", "pyramid"]])
@pytest.mark.parametrize("name", ["head_dim", "num_heads", "causal"])
def test_what_layers_set_is_told_in_blocks_with_rotary_positions_too(tmp_path, host, name):
    arguments = ["compare", "--mechanisms", "pola", "--device", "cpu", *host, "--option", f"{name}=1"]
    arguments += ["--output", str(tmp_path / "c")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    assert f"--option: mechanism_options must not hold '{name}': the layer sets it" in done.output


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("pola.alhpa=4", "mechanism 'pola' has no option 'alhpa'; it takes"),
        ("pola.alpha=-1", "pola: alpha must be a number > 0, got -1"),
        ("mirror.modulation=every", "mirror: modulation must be one of 'sequence', 'token', 'none', None, got 'every'"),
        ("nala.power=3", "nala.* is given, but nala is not compared"),
        ("alpha=4", "has no option 'alpha'"),
        ("pola.causal=True", "must not hold 'causal': the layer sets it"),
        ("power", "must look like key=value or mechanism.key=value, got 'power'"),
    ],
)
def test_a_wrong_option_is_told_before_any_run(tmp_path, option, words):
    arguments = ["compare", "--mechanisms", "softmax,pola,mirror", "--depth", "1", "--device", "cpu"]
    arguments += ["--option", option, "--output", str(tmp_path / "c")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    assert "--option" in done.output
    assert words in done.output
    assert not (tmp_path / "c").exists()
