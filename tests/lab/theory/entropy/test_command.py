"""``linattn lab entropy`` from its options to its files."""

import json
import re

import pytest
import torch
import typer
from tests.lab.page.html_page import parse
from typer.testing import CliRunner

from linattn.lab.cli.lab_entropy import entropy
from linattn.lab.tasks import load_images
from linattn.lab.theory.entropy import hosts
from linattn.lab.theory.entropy.activations import Activations
from linattn.lab.theory.entropy.measure import attention_rows, fitting_mechanism
from linattn.lab.theory.entropy.pretrained import text_activations
from linattn.lab.theory.entropy.settings import EntropyConfig
from linattn.models.vision import create_vit

TINY = ["--heads", "2", "--head-dim", "8", "--tokens", "16", "--scales", "0.25,1,4", "--device", "cpu"]
app = typer.Typer()
app.command()(entropy)


def run(*options):
    return CliRunner().invoke(app, [*map(str, options), *TINY])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("entropy")


def test_training_a_host_and_all_files(folder, monkeypatch):
    few = load_images("digits").subset(train=320, test=40)
    monkeypatch.setattr(hosts, "load_images", lambda source: few)
    options = ("--mechanisms", "softmax,relu,pola,gated", "--hosts", "pola", "--epochs", 1, "--images", 4)
    result = run("--output", folder, *options)
    assert result.exit_code == 0, result.output
    assert "14 of 14 checks hold" in result.output
    found = json.loads((folder / "lab-entropy.json").read_text())
    assert {"device", "versions", "command", "date", "seed", "settings"} <= set(found["meta"])
    assert all(check["passed"] for check in found["checks"])
    rows = found["rows"]
    given = [row["mechanism"] for row in rows if row["source"] == "random"]
    assert given == ["softmax", "relu", "pola", "gated"]
    real = [row for row in rows if row["source"].startswith("pola trained on digits") and not row["trained"]]
    own = [row for row in rows if row["trained"]]
    assert len(real) == 4 * 3
    assert [row["mechanism"] for row in own] == ["pola"] * 3
    # On the same activations, once as it starts and once as it was trained: its powers have moved.
    assert {row["kind"] for row in real if row["mechanism"] in ("relu", "pola", "gated")} == {"blind"}
    started = [row for row in real if row["mechanism"] == "pola"]
    assert all(abs(a["pse"][1] - b["pse"][1]) > 1e-6 for a, b in zip(started, own, strict=True))
    charts = sorted(path.name for path in folder.glob("*.png"))
    assert charts == [f"lab-entropy-{name}.png" for name in ("correlation", "power", "random", "real", "trained")]
    page = parse((folder / "lab-entropy.html").read_text())
    sections = [node.attributes["id"] for node in page.find("section")]
    assert sections[0] == "checks"
    assert sections[-2:] == ["numbers", "made"]
    assert len(page.find("li")) >= 14
    assert "mathdefault" not in page.text
    assert page.find("b")[0].text == "pass"


def test_what_is_given_wins_over_a_preset(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "linattn.lab.theory.entropy.run.entropy_on_screen", lambda config, *rest: seen.append(config) or 0
    )
    for options in (["--quick"], ["--quick", "--hosts", "relu,nala", "--epochs", "3"], []):
        assert CliRunner().invoke(app, [*options, "--output", str(tmp_path), "--device", "cpu"]).exit_code == 0
    found = [(config.hosts, config.epochs, config.tokens) for config in seen]
    assert found == [(("softmax",), 1, 32), (("relu", "nala"), 3, 32), (EntropyConfig.hosts, 10, 64)]


def test_a_checkpoint_stands_in_for_training(folder):
    torch.manual_seed(0)
    (folder / "run").mkdir()
    torch.save(create_vit("digits", "relu").state_dict(), folder / "run" / "weights.pt")
    options = ("--output", folder, "--name", "mine", "--no-chart", "--mechanisms", "softmax", "--images", 2)
    result = run(*options, "--checkpoint", folder / "run", "--hosts", "relu")
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / "mine.json").read_text())["rows"]
    assert [row["source"] for row in rows] == ["random"] + ["relu from run"] * 6
    assert not (folder / "mine.html").exists()
    wrong = run(*options, "--checkpoint", folder / "run", "--hosts", "relu", "--patch-size", 4)
    assert wrong.exit_code == 2
    assert "does not fit the host" in words(wrong.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scales", "2,4"], "must be numbers above 0, 1 and another one among them"),
        (["--hosts", "softmaxx"], "must be one of"),
        (["--mechanisms", "nothing"], "must be one of"),
        (["--tokens", "4"], "must be at least 8"),
        (["--head-dim", "7"], "must be even"),
        (["--checkpoint", "nowhere"], "must be a folder with weights.pt or config.json"),
    ],
)
def test_wrong_options(options, message):
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert message in words(result.output)


def words(text):
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Attention is a weighted mean of values, and its weights add up to one. " * 2)
    return path


def test_rows_of_any_model_of_transformers_are_its_own(tmp_path, text):
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    model = LlamaModel(config).eval()
    model.save_pretrained(tmp_path)
    given = EntropyConfig(batch=2, tokens=24, checkpoint=tmp_path, text=text)
    (layers,) = text_activations(given)
    ids = torch.tensor(list(text.read_bytes()[:48])).view(2, 24)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(layers) == len(attentions) == 2
    for layer, expected in zip(layers, attentions, strict=True):
        assert isinstance(layer, Activations)
        assert (layer.causal, layer.own) == (True, None)
        found = attention_rows(fitting_mechanism("softmax", layer, 0), layer)
        torch.testing.assert_close(found.float(), expected[:, :, 18:], atol=1e-5, rtol=1e-4)


def test_language_models_of_this_library(tmp_path, text):
    from linattn.models.language import LinearAttentionConfig, LinearAttentionForCausalLM

    torch.manual_seed(0)
    config = LinearAttentionConfig(
        mechanism="gated", vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LinearAttentionForCausalLM(config).save_pretrained(tmp_path)
    result = run("--checkpoint", tmp_path, "--text", text, "--output", tmp_path, "--no-chart", "--mechanisms", "gated")
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads((tmp_path / "lab-entropy.json").read_text())["rows"] if row["source"] != "random"]
    assert [(row["mechanism"], row["trained"]) for row in rows] == [("gated", False)] * 2 + [("gated", True)] * 2
    assert all(row["pse"] for row in rows)
    assert run("--checkpoint", tmp_path).exit_code == 2  # without a text
