"""Language models from the command line: trained, resumed, made to write; and what a user is told."""

import json
from json import loads

import pytest
from typer.testing import CliRunner

from linattn.lab.cli.main import app
from linattn.lab.compare import compare
from linattn.lab.compare.text import costs
from linattn.lab.train.text import screen
from linattn.support import extras

SHAPE = ["--device", "cpu", "--size", "pico", "--width", "16", "--depth", "2", "--batch-size", "4"]
TINY = [*SHAPE, "--steps", "2"]
MQAR = ["--set", "vocab=32", "--set", "length=16", "--set", "test_examples=8"]


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    return path


def test_a_language_model_is_trained_and_writes(text, tmp_path):
    folder = tmp_path / "lm"
    arguments = ["train", "lm", "--data", text, "--length", 32, *SHAPE, "--hybrid", "gated,softmax"]
    arguments += ["--canon", "AbCD"]
    arguments += ["--option", "gated.gate=head", "--tokens", 3 * 4 * 32, "--output", folder]
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    told = loads((folder / "result.json").read_text())
    assert f"gated,softmax on text: {told['score']:.4f} bits per byte after 3 steps" in result.output
    config = loads((folder / "config.json").read_text())
    assert config["mechanism"] == ["gated", "softmax"]
    assert config["mechanism_options"] == [{"gate": "head"}, {}]
    assert (config["canon"], config["vocab_size"]) == ("AbCD", 256)
    again = call(*arguments)
    assert again.output == result.output, "finished: told again, not trained again"
    written = call("generate", folder, "--prompt", "The qu", "--max-new-tokens", "4", "--device", "cpu")
    assert written.exit_code == 0, written.output
    assert written.stdout.startswith("The qu")
    assert "%|" not in written.stderr, "no bar of transformers"
    # and an encoder on the same text
    other = call(
        "train", "mlm", "--data", text, "--length", "16", *TINY, "--mechanism", "lion", "--output", tmp_path / "m"
    )
    assert other.exit_code == 0, other.output
    assert "% right" in other.output
    assert loads((tmp_path / "m" / "config.json").read_text())["architectures"] == ["LinearAttentionForMaskedLM"]


def test_a_task_is_trained_from_weights_of_another_run(tmp_path):
    first = call("train", "task", "mqar", *MQAR, *TINY, "--eval-every", "1", "--output", tmp_path / "a")
    assert first.exit_code == 0, first.output
    lines = (tmp_path / "a" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    second = call("train", "task", "mqar", *MQAR, *TINY, "--start", tmp_path / "a", "--output", tmp_path / "b")
    assert second.exit_code == 0, second.output
    assert loads((tmp_path / "b" / "result.json").read_text())["fingerprint"]["start"] == str(tmp_path / "a")


def test_glue_goes_on_from_a_model_of_masked_text(text, tmp_path):
    """And from one that was tuned on another task of GLUE, whose classes may be others."""
    small = [
        "--width",
        "16",
        "--depth",
        "1",
        "--heads",
        "2",
        "--batch-size",
        "4",
        "--device",
        "cpu",
        "--mechanism",
        "lion",
    ]
    for name, classes in (("three", 3), ("two", 2)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"sentence1": "a b", "sentence2": "c", "label": n % classes}) for n in range(6)]
        for part in ("train", "validation"):
            (tmp_path / name / f"{part}.jsonl").write_text("\n".join(lines))
    call("train", "mlm", "--data", text, *small, "--recipe", "masked-text", "--steps", "1", "--length", "16",
         "--output", tmp_path / "mlm")  # fmt: skip
    start = tmp_path / "mlm"
    # epochs of 6 rows, 4 a step: 3, 3 and 10 of them
    for name, recipe, steps in (("three", "glue", 4), ("two", "glue-rte", 4), ("two", "glue-large-cola", 15)):
        out = tmp_path / recipe
        result = call("train", "task", "glue", "--data", tmp_path / name, *small, "--recipe", recipe, "--start", start,
                      "--output", out)  # fmt: skip
        assert result.exit_code == 0, result.output
        assert f"after {steps} steps" in result.output
        start = out


def test_similar_sentences_are_learnt_and_compared(tmp_path, monkeypatch):
    """A number from one logit: the longer the first sentence, the higher."""
    monkeypatch.setattr(costs, "MIN_SECONDS", 0.0)
    rows = [{"sentence1": "a" * (n % 6), "sentence2": "b", "label": float(n % 6)} for n in range(48)]
    for part in ("train", "validation"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = ["--data", tmp_path, "--depth", "1", "--heads", "1", "--device", "cpu", "--set", "length=8",
             "--batch-size", "16", "--steps", "60", "--warmup-steps", "5"]  # fmt: skip
    one = ["--mechanism", "elu", "--width", "16", "--lr", "0.02"]
    result = call("train", "task", "stsb", *small, *one, "--output", tmp_path / "a")
    assert result.exit_code == 0, result.output
    told = loads((tmp_path / "a" / "result.json").read_text())
    assert f"elu on stsb: Pearson {told['score']:.2f} % after 60 steps" in result.output
    assert told["score"] > 80
    assert told["records"][-1]["train_loss"] < 35 / 12, "less than the spread of the labels"
    several = [
        "--mechanisms",
        "elu",
        "--widths",
        "16",
        "--lr",
        "0.01,0.02",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--no-weights",
    ]
    compared = call("compare", "--task", "stsb", *small[:-4], "--steps", "2", *several, "--output", tmp_path / "c")
    assert compared.exit_code == 0, compared.output
    assert "pearson %" in compared.output


def test_a_recipe_that_is_named_brings_its_host(tmp_path):
    """What is given beside it stands; without its name a task has its small host."""
    few = ["--set", "train_examples=8", "--set", "test_examples=4", "--set", "length=60", "--set", "shortest=10"]
    small = [*few, "--steps", "1", "--batch-size", "2", "--device", "cpu"]

    def shape(folder, *options):
        result = call("train", "task", "listops", *small, *options, "--output", tmp_path / folder)
        assert result.exit_code == 0, result.output
        config = loads((tmp_path / folder / "config.json").read_text())
        return config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]

    def dropout(folder, *options):
        assert call("train", "task", "listops", *small, *options, "--output", tmp_path / folder).exit_code == 0
        return loads((tmp_path / folder / "config.json").read_text())["dropout"]

    assert shape("named", "--recipe", "listops-s5", "--depth", "1") == (1, 128, 2)
    assert dropout("dropped", "--recipe", "listops") == 0.1
    assert dropout("kept", "--recipe", "listops", "--dropout", "0") == 0
    assert dropout("unnamed") == 0
    assert shape("size", "--recipe", "listops-s5", "--size", "pico") == (2, 64, 2)
    assert shape("usual") == (2, 64, 2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "task", "chess"], ["{TASK}", "value for TASK: must be one of text", "mqar", "listops"]),
        (["train", "task", "mqar", "--set", "vocab"], ["--set", "key=value"]),
        (["train", "task", "mqar", "--set", "colour=1"], ["--set colour", "no such setting", "pairs"]),
        (["train", "task", "mqar", "--set", "pairs=a"], ["--set pairs", "a whole number"]),
        (["train", "task", "mqar", "--set", "batch_size=2"], ["--set batch_size", "no such setting"]),
        (["train", "task", "listops", "--set", "depth=0"], ["--set depth", "at least 2"]),  # --depth is the model's
        (["train", "lm", "--data", "README.md", "--length", "1"], ["--length", "at least 2"]),
        (["compare", "--task", "listops", "--set", "depth=0"], ["--set depth", "at least 2"]),
        (["train", "task", "mqar", *MQAR, "--mechanism", "nobody"], ["--mechanism", "nobody"]),
        (["train", "task", "mqar", *MQAR, "--hybrid", "gated*x"], ["--hybrid", "gated*3,softmax"]),
        (["train", "task", "mqar", *MQAR, "--hybrid", "gated,nobody"], ["--hybrid", "nobody"]),
        (["train", "task", "mqar", *MQAR, "--size", "pico", "--width", "65"], ["--width", "divide hidden_size = 65"]),
        (["train", "task", "mqar", *MQAR, "--width", "65", "--heads", "2"], ["--heads", "divide hidden_size = 65"]),
        (["compare", "--task", "mqar", *MQAR, "--size", "pico", "--widths", "65"], ["--widths", "hidden_size = 65"]),
        (["train", "lm", "--data", "README.md", "--set", "evaluate=all"], ["--set evaluate", "one of test, valid"]),
        (["train", "task", "mqar", *MQAR, "--canon", "AQ"], ["--canon", "'Q'"]),
        (["train", "task", "mqar", *MQAR, "--size", "huge"], ["--size", "pico"]),
        (["train", "task", "mqar", *MQAR, "--attention-norm", "None"],
         ["--attention-norm: must be one of auto, none, layer, rms, head_layer, head_rms, got 'None'"]),
        (["train", "task", "mqar", *MQAR, "--attention-gate", "relu"],
         ["--attention-gate: must be one of none, linear, silu, got 'relu'"]),
        (["train", "task", "mqar", *MQAR, "--steps", "0"], ["--steps", "at least 1"]),
        (["train", "task", "mqar", *MQAR, "--schedule", "sine"], ["--schedule: must be one of cosine, linear, got"]),
        (["compare", "--task", "mqar", *MQAR, "--schedule", "sine"], ["--schedule: must be one of cosine, linear"]),
        (["train", "task", "mqar", *MQAR, "--recipe", "secret"], ["--recipe", "listops"]),
        (["train", "lm", "--data", "README.md", "--length", "32", "--recipe", "listops"],
         ["--recipe: listops is for classification tasks, and text is causal", "one of language, mqar-64,"]),
        (["train", "mlm", "--data", "README.md", "--length", "32", "--recipe", "mqar-64"],
         ["and masked-text is masked; must be one of language, masked-text "]),
        (["train", "lm", "--data", "nowhere.txt"], ["--data", "does not exist"]),
        (["train", "--epochs", "0"], ["--epochs", "at least 1"]),  # images, as before there was anything else
        (["train", "lm"], ["--data"]),
        (["compare", "--task", "chess"], ["value for --task: must be one of text", "mqar"]),
        (["compare", "--task", "listops", "--recipe", "mqar-64"], ["--recipe: mqar-64 is for causal tasks"]),
        (["compare", "--task", "mqar", *MQAR, "--attention-norm", "l1"],
         ["--attention-norm: must be one of auto, none, layer, rms, head_layer, head_rms, got 'l1'"]),
        (["compare", "--task", "mqar", *MQAR, "--attention-gate", "relu"],
         ["--attention-gate: must be one of none, linear, silu, got 'relu'"]),
        (["compare", "--task", "mqar", *MQAR, "--mechanisms", "nobody"], ["--mechanisms", "nobody"]),
        (["compare", "--task", "mqar", *MQAR, "--mechanisms", "agent"], ["--mechanisms", "agent"]),
        (["compare", "--task", "mqar", *MQAR, "--canon", "ABCD,ABCD"], ["--canon", "once"]),
        (["compare", "--task", "mqar", *MQAR, "--option", "lion.decay=fixed"], ["--option", "lion is not compared"]),
        (["compare", "--task", "mqar", *MQAR, "--widths", "a"], ["--widths", "integers"]),
        (["compare", "--task", "mqar", *MQAR, "--widths", "0"], ["--widths", "must be an integer >= 1"]),
        (["compare", "--task", "mqar", *MQAR, "--mechanisms", "gated*x"], ["--mechanisms", "gated*3,softmax"]),
    ],
)  # fmt: skip
def test_a_bad_option_is_named_without_a_traceback(arguments, parts, tmp_path):
    result = call(*arguments, "--device", "cpu", "--output", tmp_path / "x")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["task", "mqar"], ["images", "--epochs", "1"]])
def test_a_file_in_the_place_of_the_folder_is_named(command, tmp_path):
    (tmp_path / "x").write_text("")
    result = call("train", *command, "--device", "cpu", "--output", tmp_path / "x")
    assert result.exit_code == 2, result.output
    assert "--output: must be a folder that can be written to" in result.output


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["compare", "--task", "chess"], "linattn compare --task TASK"),
        (["compare", "--seeds", "1", "--task=chess"], "linattn compare --task TASK"),
        (["compare", "text", "--task", "chess"], "linattn compare text"),
        (["compare", "--epochs", "0"], "linattn compare images"),
    ],
)
def test_a_usage_line_has_what_was_typed(typed, shown, tmp_path):
    told = CliRunner().invoke(
        app, [*typed, "--device", "cpu", "--output", str(tmp_path / "x")], prog_name="linattn", env={"TERM": "dumb"}
    )
    assert told.exit_code == 2
    assert f"Usage: {shown} [OPTIONS]" in told.output
    assert f"Try '{shown} --help'" in told.output
    helped = CliRunner().invoke(app, [*shown.split()[1:], "--help"], prog_name="linattn", env={"TERM": "dumb"})
    assert helped.exit_code == 0, "what it says to try"
    assert f"Usage: {shown} [OPTIONS]" in helped.output


def test_none_is_typed_for_a_norm_and_a_gate(tmp_path):
    options = ["--mechanism", "elu", "--attention-norm", "none", "--attention-gate", "none"]
    result = call("train", "task", "mqar", *MQAR, *TINY, *options, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    config = loads((tmp_path / "config.json").read_text())
    assert (config["attention_norm"], config["attention_gate"]) == (None, None)


def test_a_recipe_of_another_task_of_the_same_kind_is_taken(tmp_path):
    """Its budget and its host, and none of the settings of its task."""
    small = ["--device", "cpu", "--steps", "1", "--batch-size", "2"]
    result = call("train", "task", "mqar", *MQAR, *small, "--recipe", "mad-recall", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert loads((tmp_path / "config.json").read_text())["hidden_size"] == 128
    told = loads((tmp_path / "result.json").read_text())["fingerprint"]
    assert told["lr"] == 5e-4


def test_a_recipe_that_is_not_named_brings_its_data_and_its_rates(text, tmp_path, monkeypatch):
    """To one run and to a comparison alike; options that are given win."""
    configs, jobs = [], []
    monkeypatch.setattr(compare, "compare", lambda config, _: configs.append(config) or 0)
    monkeypatch.setattr(screen, "train_text_on_screen", lambda job, _: jobs.append(job) or 0)

    def told(*arguments):
        result = call(*arguments, "--device", "cpu", "--output", tmp_path)
        assert result.exit_code == 0, result.output

    told("compare", "--task", "mad-recall", "--mechanisms", "elu")
    assert configs[0].settings == {"train_examples": 12_800}
    assert configs[0].train.steps == 20_000
    told("compare", "--task", "mad-recall", "--mechanisms", "elu", "--set", "train_examples=1280")
    assert (configs[1].settings, configs[1].train.steps) == ({"train_examples": 1280}, 2000)
    told("compare", "--task", "listops", "--mechanisms", "elu")
    told("compare", "--task", "listops", "--mechanisms", "elu", "--schedule", "cosine")
    assert [config.train.schedule for config in configs[2:]] == ["linear", "cosine"]
    told("train", "mlm", "--data", text, "--length", "32")
    told("train", "mlm", "--data", text, "--length", "32", "--set", "share=0.2", "--schedule", "cosine")
    assert [job.task.share for job in jobs] == [0.3, 0.2]
    assert [job.changes["schedule"] for job in jobs] == [None, "cosine"]


def test_heads_and_tied_embeddings_of_a_recipe_reach_the_host(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(screen, "train_text_on_screen", lambda job, _: jobs.append(job) or 0)
    for more in ((), ("--heads", "4"), ("--size", "pico")):
        result = call("train", "task", "capo", "--recipe", "capo-50k", *more, "--device", "cpu", "--output", tmp_path)
        assert result.exit_code == 0, result.output
    found = [(job.host.width, job.host.heads, job.host.head_dim, job.host.tied) for job in jobs]
    assert found == [(512, None, 64, True), (512, 4, None, True), (None, None, None, None)]


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        (["lra-text"], ['{"text": "a", "label": 7}'], 'needs a "label", a whole number in 0..1, got 7'),
        (["glue"], ['{"words": "a", "label": 0}'], "a line needs sentence or text"),
        (["glue"], ["words"], "train.jsonl:1 is no JSON"),
        (["listops", "--set", "depth=2"], [], "change these settings"),
    ],
)
def test_data_that_make_no_sense_are_told_in_a_sentence(task, lines, message, tmp_path):
    """They are read when the first batch is asked for, long after the options were."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = ["--data", tmp_path] if lines else []
    result = call("train", "task", *task, *data, *TINY, "--output", tmp_path / "x")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["lm", "mlm"])
def test_help_and_error_agree_on_what_a_tokenizer_is(command, text, tmp_path):
    told = call("train", command, "--help").output
    assert "Folder of a tokenizer" in told
    assert "name of a tokenizer" not in told
    result = call("train", command, "--data", text, "--tokenizer", "gpt2", *TINY, "--output", tmp_path / "x")
    assert result.exit_code == 2
    assert "--tokenizer: must be a folder with a tokenizer" in " ".join(result.output.replace("│", " ").split())


def test_a_missing_extra_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for command in (["train", "task", "mqar"], ["compare", "--task", "mqar"]):
        result = call(*command, *MQAR, "--device", "cpu", "--output", tmp_path / "x")
        assert result.exit_code == 2
        assert "pip install 'linattn[" in result.output
    assert not (tmp_path / "x").exists()
