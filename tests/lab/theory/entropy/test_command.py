"""The laboratory from its options to its files."""

import pytest
import torch

from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen
from linattn.lab.tasks import load_images
from linattn.lab.theory.entropy import experiment
from linattn.lab.theory.entropy.activations import attention_rows, fitting_mechanism, text_activations
from linattn.lab.theory.entropy.experiment import Entropy
from linattn.models.vision import create_vit
from linattn.support.options import OptionError

TINY = {"heads": 2, "head_dim": 8, "tokens": 16, "scales": (0.25, 1.0, 4.0), "device": "cpu", "jobs": 1}


def run(**options):
    lab = Entropy(**TINY, **options)
    assert lab.run(Screen(quiet=True)) == 0
    return load_results(lab.folder / "results.json")["rows"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("entropy")


def test_training_a_host_and_all_files(folder, monkeypatch):
    few = load_images("digits").subset(train=320, test=40)
    monkeypatch.setattr(experiment, "load_images", lambda source: few)
    names = ("softmax", "relu", "pola", "gated")
    rows = run(output=folder, mechanisms=names, hosts=("pola",), epochs=1, images=4)
    assert sum(row["about"] == "checks" and row["passed"] for row in rows) == 14
    assert [row["mechanism"] for row in rows if row["about"] == "random"] == list(names)
    real = [row for row in rows if row["about"] == "host" and not row["trained"]]
    own = [row for row in rows if row["about"] == "host" and row["trained"]]
    assert len(real) == 4 * 3
    assert [row["mechanism"] for row in own] == ["pola"] * 3
    # On the same activations, once as it starts and once as it was trained: its powers have moved.
    assert {row["kind"] for row in real if row["mechanism"] in ("relu", "pola", "gated")} == {"blind"}
    started = [row for row in real if row["mechanism"] == "pola"]
    assert all(abs(a["pse"][1] - b["pse"][1]) > 1e-6 for a, b in zip(started, own, strict=True))
    charts = sorted(path.stem for path in folder.glob("*.png"))
    assert charts == [f"entropy-{name}" for name in ("correlation", "power", "random", "real", "trained")]
    page = (folder / "report.html").read_text()
    assert "14 of 14 checks hold" in page
    assert "Theorems, checked" in page
    assert "mathdefault" not in page  # numbers on axes are plain text


def test_what_is_given_wins_over_quick():
    found = [Entropy(quick=True), Entropy(quick=True, hosts=("relu", "nala"), epochs=3), Entropy()]
    chosen = [(lab.chosen("hosts"), lab.chosen("epochs"), lab.chosen("tokens")) for lab in found]
    assert chosen == [(("softmax",), 1, 32), (("relu", "nala"), 3, 32), (experiment.HOSTS, 10, 64)]


def test_a_checkpoint_stands_in_for_training(folder, tmp_path):
    torch.manual_seed(0)
    (folder / "run").mkdir()
    torch.save(create_vit("digits", "relu").state_dict(), folder / "run" / "weights.pt")
    options = {"mechanisms": ("softmax",), "images": 2, "checkpoint": folder / "run", "hosts": ("relu",)}
    rows = run(output=tmp_path, **options)
    assert [row["source"] for row in rows if row["about"] != "checks"] == ["random"] + ["relu from run"] * 6
    with pytest.raises(OptionError, match="does not fit the host"):
        run(output=tmp_path, patch_size=4, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scales", "2,4"), ("hosts", "softmaxx"), ("mechanisms", "nothing"), ("tokens", "4"), ("head_dim", "7"),
     ("checkpoint", "nowhere")],
)  # fmt: skip
def test_wrong_options(name, value):
    with pytest.raises(OptionError) as raised:
        Entropy.parse({name: value})
    assert raised.value.option == name


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
    layers = text_activations(tmp_path, text, 2, 24)
    ids = torch.tensor(list(text.read_bytes()[:48])).view(2, 24)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(layers) == len(attentions) == 2
    for layer, expected in zip(layers, attentions, strict=True):
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
    rows = run(checkpoint=tmp_path, text=text, output=tmp_path / "out", mechanisms=("gated",))
    rows = [row for row in rows if row["about"] == "text"]
    assert [(row["mechanism"], row["trained"]) for row in rows] == [("gated", False)] * 2 + [("gated", True)] * 2
    assert all(row["pse"] for row in rows)
    with pytest.raises(OptionError, match="text"):
        Entropy(checkpoint=tmp_path)
