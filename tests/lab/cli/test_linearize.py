import json
import shutil

import pytest
from tests.convert.tiny_folder import model_folder, text_file
from tests.lab.pages.html_page import parse
from typer.testing import CliRunner

from linattn.lab.cli.main import app


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


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


def test_a_model_is_converted_reported_written_with_and_not_done_twice(folder, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    results = tmp_path / "results" / "tiny.json"
    result = call("linearize", folder, "--text", text, "--out", out, *SMALL, "--results", results)
    assert result.exit_code == 0, result.output
    assert results.read_bytes() == (out / "report.json").read_bytes()
    assert all(f"layer {number} misses" in result.output for number in (0, 1))
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
    assert report["meta"]["settings"]["model"] == "tiny"  # not where it lay
    assert parse((out / "report.html").read_text()).find("section", id="stages")
    written = call("generate", out, "--prompt", "river stone", "--max-new-tokens", 5, "--device", "cpu")
    assert written.exit_code == 0, written.output
    assert written.output.startswith("river stone")

    from linattn.convert.evaluate import evaluator

    monkeypatch.setattr(evaluator, "perplexity", None)  # every stage was measured: nothing may be measured again
    weights = (out / "model.safetensors").read_bytes()
    again = call("linearize", folder, "--text", text, "--out", out, *SMALL)
    assert again.exit_code == 0, again.output
    assert (out / "model.safetensors").read_bytes() == weights
    other = call("linearize", folder, "--text", text, "--out", out, *SMALL, "--lr", 0.5)
    assert other.exit_code == 2
    assert "--out" in other.output
    assert "another transfer" in other.output
    assert "converted already" in call("linearize", out, "--out", tmp_path / "twice").output


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--method", "magic"], "--method"),
        (["--option", "window=-1"], "--option"),
        (["--option", "gate=maybe"], "true or false"),
        (["--option", "gate=true", "--loss", "cross_entropy"], "--loss"),
        (["--method", "dof", "--option", "cost=0"], "--option"),
        (["--method", "dof", "--option", "clip=0"], "--option"),
        (["--recipe", "book"], "must be one of paper, got 'book'"),
        (["--recipe", "paper", "--method", "t2r"], "still, lolcats, dof, got method 't2r'"),
        (["--results", "."], "--results"),
        (["--targets", "q_proj,magic"], "--targets"),
        (["--option", "colour=red"], "colour"),
        (["--method", "features", "--option", "mechanism=relu", "--option", "power=3"], "power"),
        (["--layers", "7"], "--layers"),
        (["--length", "100000"], "--length"),
        (["--length", "1"], "--length"),
        (["--text", "nowhere.txt"], "--text"),
        (["--finetune-lr", "0"], "--finetune-lr"),
        (["--rank", "0"], "--rank"),
        (["--recall-share", "2"], "--recall-share"),
        (["--recall-share", "0.5", "--length", "32"], "--recall-share"),
        (["--finetune-recall-share", "-1"], "--finetune-recall-share"),
        (["--lengths", "1"], "--lengths"),
        (["--needle-lengths", "64"], "--needle-lengths"),
        (["--needle-haystacks", "noise,hay"], "must be one of noise, text, got 'hay'"),
        (["--needle-haystacks", "text", "--needle-lengths", "256,9000"], "--needle-haystacks"),
        (["--device", "tpu"], "--device"),
        (["--probe", "."], "--probe"),
    ],
)
def test_a_wrong_option_is_named_before_any_work(folder, text, tmp_path, change, named):
    out = tmp_path / "out"
    result = call("linearize", folder, "--text", text, "--out", out, *change)
    assert result.exit_code == 2, result.output
    assert named in result.output
    assert not out.exists()


def test_the_second_stage_repeats_passages_as_the_first_unless_told_otherwise(folder, text, tmp_path, monkeypatch):
    from linattn.lab.convert.jobs import linearize_run

    jobs = []
    monkeypatch.setattr(linearize_run, "linearize_folder", lambda job, console: jobs.append(job) or 0)
    for more in ([], ["--recall-share", 0.5], ["--recall-share", 0.5, "--finetune-recall-share", 0]):
        call("linearize", folder, "--text", text, "--out", tmp_path / "out", *more)
    assert [(job.transfer.recall_share, job.finetune.recall_share) for job in jobs] == [(0, 0), (0.5, 0.5), (0.5, 0)]
    kept = [job.settings() for job in jobs]
    assert kept[1]["transfer"] == kept[2]["transfer"] == kept[0]["transfer"] | {"recall_share": 0.5}
    assert kept[1]["finetune"] == kept[2]["finetune"] | {"recall_share": 0.5}


def test_stages_of_a_paper_are_had_by_name_and_what_is_given_counts_more(folder, text, tmp_path, monkeypatch):
    from linattn.lab.convert.jobs import linearize_run

    jobs = []
    monkeypatch.setattr(linearize_run, "linearize_folder", lambda job, console: jobs.append(job) or 0)
    paper = ["--text", text, "--out", tmp_path / "out", "--recipe", "paper"]
    for more in (["--method", "lolcats"], ["--steps", 7, "--finetune-lr", 0.5], ["--method", "dof"]):
        assert call("linearize", folder, *paper, *more).exit_code == 0
    first, second = jobs[0].transfer, jobs[0].finetune
    assert (first.loss, first.lr, first.scale_factor, first.tokens) == ("mse", 1e-2, 1.0, 20_000_000)
    assert (second.objective, second.lr, second.rank, second.alpha) == ("next_token", 1e-4, 8, 16.0)
    assert (jobs[1].transfer.steps, jobs[1].transfer.tokens) == (7, None)
    assert (jobs[1].finetune.lr, jobs[1].finetune.alpha, jobs[1].finetune.tokens) == (0.5, 8.0, 20_000_000)
    assert (jobs[2].transfer.loss, jobs[2].transfer.batch_size, jobs[2].transfer.tokens) == ("cross_entropy", 128, None)


def test_random_features_learn_rows_at_the_rates_of_their_paper(folder, text, tmp_path, monkeypatch):
    """The command of the documentation, shorter; z at 0.02 and the logarithms of alpha at 0.2."""
    from linattn.convert.transfer import _Round as Round

    rates = []
    begin = Round.begin
    monkeypatch.setattr(Round, "begin", lambda own: rates.append(own) or begin(own))
    result = call("linearize", folder, "--method", "dof", "--text", text, "--out", tmp_path / "out", "--loss",
                  "cross_entropy", "--lr", 0.02, "--no-finetune", *SMALL[:6], "--device", "cpu", "--no-evaluate",
                  "--option", "clip=8")  # fmt: skip
    assert result.exit_code == 0, result.output
    (learned,) = rates
    groups = learned.optimizers["0"].param_groups
    highest = {group["params"][0].ndim: learned.options.lr * group["factor"] for group in groups}
    assert highest == {3: 0.02, 2: 0.2}  # z (heads, features, channels), alpha (heads, features)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert all(curve["losses"][-1] < curve["losses"][0] for curve in report["transfer"])
    assert all(layer["feature_dim"] <= 8 for layer in report["plan"]["layers"].values())


def test_needles_are_hidden_in_what_was_asked_for(folder, text, tmp_path, monkeypatch):
    from linattn.lab.convert.jobs import linearize_run

    jobs = []
    monkeypatch.setattr(linearize_run, "linearize_folder", lambda job, console: jobs.append(job.check() and job) or 0)
    for more in ([], ["--needle-haystacks", "text, noise"]):
        result = call("linearize", folder, "--text", text, "--out", tmp_path / "out", "--device", "cpu", *more)
        assert result.exit_code == 0, result.output
    found = [job.evaluation_options(job.check()).needle_haystacks for job in jobs]
    assert found == [("noise",), ("text", "noise")]


def test_lengths_that_nobody_asked_for_are_left_out_where_a_needle_is_longer(folder, text, tmp_path, monkeypatch):
    """Its default lengths are 64 and 128 tokens, and a needle has more bytes than that."""
    from linattn.lab.convert.jobs import linearize_run

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(linearize_run, "linearize", stop)
    result = call("linearize", folder, "--text", text, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 130, result.output  # all was checked
    assert "no needles in 64 tokens" in result.output


def test_text_is_needed_to_measure_on(folder, tmp_path):
    result = call("linearize", folder, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "--eval-text" in result.output
    bare = call("linearize", folder, "--out", tmp_path / "out", "--no-evaluate", "--no-page", "--device", "cpu")
    assert bare.exit_code == 0, bare.output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_lines_without_a_text_are_named_with_the_option_of_their_file(folder, text, tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"words": "one two"}\n')
    (tmp_path / "train.jsonl").write_text('{"label": 1}\n')
    (tmp_path / "test.jsonl").write_text("no json\n")
    for option, name in (("--text", "lines.jsonl"), ("--eval-text", "test.jsonl"), ("--probe", ".")):
        given = ("--out", tmp_path / "out", "--device", "cpu", "--text", text, option, tmp_path / name)
        result = call("linearize", folder, *given)
        assert result.exit_code == 2, result.output
        assert option in result.output
    assert "every line needs a" in call("inspect", folder, "--text", tmp_path / "lines.jsonl").output


def test_a_wrong_folder_is_named_before_any_work(folder, text, tmp_path):
    missing = call("linearize", tmp_path / "nowhere", "--text", text, "--out", tmp_path / "out")
    assert missing.exit_code == 2
    assert "MODEL_DIR" in missing.output
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    full = call("linearize", folder, "--text", text, "--out", tmp_path / "mine")
    assert full.exit_code == 2
    assert "holds something else" in full.output
    strange = tmp_path / "strange"
    shutil.copytree(folder, strange)
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 16}
    (strange / "config.json").write_text(json.dumps(config))
    unknown = call("linearize", strange, "--text", text, "--out", tmp_path / "out")
    assert unknown.exit_code == 2
    assert "adapter" in unknown.output
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in call("inspect", bare, "--text", text).output
    written = call("inspect", folder, "--text", text, "--output", text, "--device", "cpu")
    assert written.exit_code == 2
    assert "--output" in written.output


def test_a_config_that_asks_for_attention_weights_is_told_before_any_work(folder, text, tmp_path):
    asking = tmp_path / "asking"
    shutil.copytree(folder, asking)
    config = json.loads((asking / "config.json").read_text()) | {"output_attentions": True}
    (asking / "config.json").write_text(json.dumps(config))
    result = call("linearize", asking, "--text", text, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 2
    assert "MODEL_DIR: output_attentions=True in the model's config is not possible" in result.output
    assert not (tmp_path / "out").exists()


def test_a_diagnosis_fits_the_screen_and_is_written(folder, text, tmp_path):
    arguments = ["--steps", 1, "--length", 48, "--held-out", 1, "--points", 16, "--window", 8, "--device", "cpu"]
    run = CliRunner().invoke(
        app,
        [str(a) for a in ("inspect", folder, "--text", text, "--output", tmp_path, *arguments)],
        env={"COLUMNS": "80", "TERM": "dumb"},
    )
    assert run.exit_code == 0, run.output
    assert "…" not in run.output
    layers = json.loads((tmp_path / "inspect.json").read_text())["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    assert all(layer["choice"] in run.output for layer in layers)
    assert (tmp_path / "charts" / "freedom.png").is_file()
    assert "--length" in call("inspect", folder, "--text", text, "--output", tmp_path, "--length", 1).output
    wrong = call("inspect", folder, "--text", text, "--output", tmp_path, "--candidates", "magic")
    assert wrong.exit_code == 2
    assert "window+salient" in wrong.output
