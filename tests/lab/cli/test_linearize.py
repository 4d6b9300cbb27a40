"""The commands ``linattn linearize`` and ``linattn inspect``, as a user has them."""

import json
import re
import shutil

import pytest
import torch
from tests.convert.tiny_folder import model_folder, text_file
from tests.lab.page.html_page import parse, table_of

from linattn.convert.evaluate.evaluator import EvaluationOptions
from linattn.convert.training.data import TokenText
from linattn.lab.command import main
from linattn.lab.convert.linearize import Linearize, held_out_pieces


@pytest.fixture
def call(capsys):
    """Runs a command; returns its exit code, and all that it has printed with single spaces."""

    def run(*arguments):
        code = main([str(each) for each in arguments])
        shown = capsys.readouterr()
        return code, " ".join((shown.out + shown.err).split())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=2, max_position_embeddings=128)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("texts") / "words.txt")


SMALL = [
    "--steps", 3, "--batch-size", 2, "--length", 64, "--finetune-steps", 2, "--finetune-batch-size", 2, "--rank", 2,
    "--device", "cpu", "--option", "window=16", "--needle-lengths", "none", "--contexts", "64,128", "--texts", 2,
    "--lengths", 64, "--new-tokens", 4,
]  # fmt: skip


def test_a_model_is_converted_reported_written_with_and_not_done_twice(folder, text, tmp_path, call):
    out = tmp_path / "out"
    code, shown = call("linearize", folder, "--text", text, "--out", out, *SMALL)
    assert code == 0, shown
    assert all(f"layer {number} misses" in shown for number in (0, 1))
    report = json.loads((out / "report.json").read_text())
    assert [stage["name"] for stage in report["stages"]] == ["teacher", "converted", "transfer", "finetune"]
    assert [curve["layer"] for curve in report["transfer"]] == [0, 1]
    assert len(report["finetune"]) == 2
    teacher, last = report["stages"][0], report["stages"][-1]
    assert [row["context"] for row in last["decoding"]] == [64, 128]
    assert teacher["decoding"][1]["cache_bytes"] == 2 * teacher["decoding"][0]["cache_bytes"]
    assert "decoding" not in report["stages"][1]
    assert set(report["ablation"]["variants"]) >= {"as converted", "window alone"}
    assert report["meta"]["training_tokens"] == (3 * 2 + 2 * 2) * 64
    assert report["meta"]["config"]["model"] == "tiny"  # not where it lay
    assert report["meta"]["config"]["precision"] == "fp32"

    root = parse((out / "report.html").read_text())
    stages = table_of(root, "Stage by stage")
    assert list(stages) == ["teacher", "converted", "transfer", "finetune"]
    assert stages["finetune"]["perplexity at 64"] == f"{last['perplexity'][0]['perplexity']:.4g}"
    assert "± " in table_of(root, "Is it the linear part?")["window alone"]["nats lost at 64"]
    assert "window 16" in table_of(root, "Layer by layer")["1"]["attention"]
    assert "option window 16" in root.find("section", id="made")[0].text
    for name in ("cost", "transfer"):
        assert root.find("section", id=name)
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    code, shown = call("generate", out, "--prompt", "river stone", "--max-new-tokens", 5, "--device", "cpu")
    assert code == 0, shown
    assert shown.startswith("river stone")

    kept = {path: path.stat().st_mtime_ns for path in (out / "run" / "figures").iterdir()}
    weights = (out / "model.safetensors").read_bytes()
    (out / "report.json").unlink()
    assert call("linearize", folder, "--text", text, "--out", out, *SMALL)[0] == 0
    assert json.loads((out / "report.json").read_text())["stages"][-1] | {"seconds": 0} == last | {"seconds": 0}
    assert {path: path.stat().st_mtime_ns for path in (out / "run" / "figures").iterdir()} == kept  # nothing measured
    assert (out / "model.safetensors").read_bytes() == weights
    code, shown = call("linearize", folder, "--text", text, "--out", out, *SMALL, "--lr", 0.5)
    assert code == 2
    assert "--out" in shown
    assert "another transfer" in shown
    assert "converted already" in call("linearize", out, "--out", tmp_path / "twice")[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--method", "magic"], "--method"),
        (["--option", "gate=maybe"], "true or false"),
        (["--option", "gate=true", "--loss", "cross_entropy"], "--loss"),
        (["--method", "dof", "--option", "cost=0"], "--option"),
        (["--recipe", "book"], "must be one of paper, got 'book'"),
        (["--recipe", "paper", "--method", "t2r"], "still, lolcats, dof, got method 't2r'"),
        (["--targets", "q_proj,magic"], "--targets"),
        (["--option", "colour=red"], "colour"),
        (["--method", "features", "--option", "mechanism=relu", "--option", "power=3"], "power"),
        (["--layers", "7"], "--layers"),
        (["--length", "100000"], "--length"),
        (["--text", "nowhere.txt"], "--text"),
        (["--finetune-lr", "0"], "--finetune-lr"),
        (["--recall-share", "0.5", "--length", "32"], "--recall-share"),
        (["--needle-lengths", "64"], "--needle-lengths"),
        (["--needle-haystacks", "noise,hay"], "must be one of noise, text, got 'hay'"),
        (["--needle-haystacks", "text", "--needle-lengths", "256,9000"], "--needle-haystacks"),
        (["--device", "tpu"], "--device"),
        (["--probe", "."], "--probe"),
    ],
)
def test_a_wrong_option_is_named_before_any_work(folder, text, tmp_path, call, change, named):
    code, shown = call("linearize", folder, "--text", text, "--out", tmp_path / "out", *change)
    assert code == 2, shown
    assert named in shown
    assert not (tmp_path / "out").exists()


def stages_of(**options):
    made = Linearize.parse({"model": ".", "out": "out", **options}).stages()
    return made["transfer"], made["finetune"]


def test_the_second_stage_repeats_passages_as_the_first_unless_told_otherwise():
    alike = stages_of(recall_share="0.5", length="48")
    assert [(stage.recall_share, stage.length) for stage in alike] == [(0.5, 48), (0.5, 48)]
    apart = stages_of(recall_share="0.5", finetune_recall_share="0", length="48", finetune_length="96")
    assert [(stage.recall_share, stage.length) for stage in apart] == [(0.5, 48), (0, 96)]
    assert stages_of(finetune="no")[1] is None


def test_stages_of_a_paper_are_had_by_name_and_what_is_given_counts_more():
    first, second = stages_of(recipe="paper", method="lolcats", steps="7", finetune_lr="0.5")
    assert (first.steps, first.tokens, first.loss, first.lr, first.scale_factor) == (7, None, "mse", 1e-2, 1.0)
    assert (second.lr, second.alpha, second.objective, second.tokens) == (0.5, 16.0, "next_token", 20_000_000)


def test_held_out_text_is_cut_into_as_many_pieces_as_texts_were_asked_for():
    pieces = held_out_pieces(TokenText(torch.arange(9), torch.arange(100)), EvaluationOptions(lengths=(16,), texts=4))
    assert [len(piece) for piece in pieces] == [25, 25, 25, 25]
    pieces = held_out_pieces(TokenText(torch.arange(9), torch.arange(100)), EvaluationOptions(lengths=(64,), texts=4))
    assert [len(piece) for piece in pieces] == [64, 36]


def test_lengths_that_nobody_asked_for_are_left_out_where_a_needle_is_longer(folder, text, tmp_path, call, monkeypatch):
    """Its default lengths are 64 and 128 tokens, and a needle has more bytes than that."""
    from linattn.lab.convert import linearize

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(linearize, "linearize", stop)
    code, shown = call("linearize", folder, "--text", text, "--out", tmp_path / "out", "--device", "cpu")
    assert code == 130, shown  # all was checked
    assert "no needles in 64 tokens" in shown


def test_text_is_needed_to_measure_on(folder, tmp_path, call):
    code, shown = call("linearize", folder, "--out", tmp_path / "out")
    assert code == 2
    assert "--eval-text" in shown
    code, shown = call("linearize", folder, "--out", tmp_path / "out", "--no-evaluate", "--no-page", "--device", "cpu",
                       "--json")  # fmt: skip
    assert code == 0, shown
    assert json.loads(shown)["stages"] == []
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "report.html").exists()


def test_lines_without_a_text_are_named_with_the_option_of_their_file(folder, text, tmp_path, call):
    (tmp_path / "lines.jsonl").write_text('{"words": "one two"}\n')
    (tmp_path / "train.jsonl").write_text('{"label": 1}\n')
    (tmp_path / "test.jsonl").write_text("no json\n")
    for option, name in (("--text", "lines.jsonl"), ("--eval-text", "test.jsonl"), ("--probe", ".")):
        given = ("--out", tmp_path / "out", "--device", "cpu", "--text", text, option, tmp_path / name)
        code, shown = call("linearize", folder, *given)
        assert code == 2, shown
        assert option in shown
    assert "every line needs a" in call("inspect", folder, "--text", tmp_path / "lines.jsonl")[1]


def changed(folder, place, **values):
    """A copy of a model's folder with other values in its config."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text()) | values
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_a_wrong_folder_is_named_before_any_work(folder, text, tmp_path, call):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    bare = changed(folder, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    strange = changed(folder, tmp_path / "strange", model_type="mamba", architectures=["MambaForCausalLM"])
    asking = changed(folder, tmp_path / "asking", output_attentions=True)
    for model, out, words in (
        (tmp_path / "nowhere", "out", "MODEL: must be a folder with config.json"),
        (folder, "mine", "--out: .* holds something else"),
        (strange, "out", "adapter"),
        (asking, "out", "MODEL: output_attentions=True in the model's config is not possible"),
        (bare, "out", "MODEL: .* has no tokenizer"),
    ):
        code, shown = call("linearize", model, "--text", text, "--out", tmp_path / out, "--device", "cpu")
        assert code == 2, shown
        assert re.search(words, shown), shown
        assert not (tmp_path / "out").exists()
    code, shown = call("inspect", folder, "--text", text, "--output", text, "--device", "cpu")
    assert code == 2
    assert "--output" in shown


def test_a_diagnosis_is_shown_written_and_drawn(folder, text, tmp_path, call):
    code, shown = call("inspect", folder, "--text", text, "--output", tmp_path, "--steps", 1, "--length", 48,
                       "--held-out", 1, "--points", 16, "--window", 8, "--device", "cpu")  # fmt: skip
    assert code == 0, shown
    layers = json.loads((tmp_path / "inspect.json").read_text())["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    assert all(layer["choice"] in shown for layer in layers)
    for layer in layers:
        assert all(f"{fit['missed']:.4f}{' ●' * (fit['name'] == layer['choice'])}" in shown for fit in layer["fits"])
    for wrong, named in ((["--length", 1], "--length"), (["--candidates", "magic"], "window+salient"),
                         (["--points", 1], "--points")):  # fmt: skip
        code, shown = call("inspect", folder, "--text", text, "--output", tmp_path, *wrong)
        assert code == 2
        assert named in shown
    assert "--text" in call("inspect", folder)[1]
