"""Language models from the command line: trained, resumed, made to write; and what a user is told."""

import json
from json import loads

import pytest

from linattn.lab.command import main
from linattn.lab.compare.text import CompareText
from linattn.lab.train.command import TrainMlm, TrainTask
from linattn.support import extras

SHAPE = ["--device", "cpu", "--size", "pico", "--width", "16", "--depth", "2", "--batch-size", "4"]
TINY = [*SHAPE, "--steps", "2"]
MQAR = ["--set", "vocab=32", "--set", "length=16", "--set", "test_examples=8"]


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    return path


def test_a_language_model_is_trained_and_writes(text, tmp_path, call):
    folder = tmp_path / "lm"
    arguments = ["train", "lm", "--data", text, "--length", 32, *SHAPE, "--hybrid", "gated,softmax", "--canon", "AbCD",
                 "--option", "gated.gate=head", "--tokens", 3 * 4 * 32, "--output", folder]  # fmt: skip
    code, said = call(*arguments)
    assert code == 0, said
    told = loads((folder / "result.json").read_text())
    assert f"gated,softmax on text: {told['score']:.4f} bits per byte after 3 steps" in said
    config = loads((folder / "config.json").read_text())
    assert config["mechanism"] == ["gated", "softmax"]
    assert config["mechanism_options"] == [{"gate": "head"}, {}]
    assert (config["canon"], config["vocab_size"]) == ("AbCD", 256)
    assert call(*arguments) == (0, said), "finished: told again, not trained again"
    prompts = ["--prompt", "The, qu", "--prompt", "b"]
    code, said = call("generate", folder, *prompts, "--max-new-tokens", "4", "--device", "cpu")
    assert code == 0, said
    assert said.startswith("The, qu")
    assert "%|" not in said, "no bar of transformers"
    # and an encoder on the same text
    code, said = call(
        "train", "mlm", "--data", text, "--length", "16", *TINY, "--mechanism", "lion", "--output", tmp_path / "m"
    )
    assert code == 0, said
    assert "% right" in said
    assert loads((tmp_path / "m" / "config.json").read_text())["architectures"] == ["LinearAttentionForMaskedLM"]


def test_a_task_is_trained_from_weights_of_another_run(tmp_path, call):
    code, said = call("train", "task", "mqar", *MQAR, *TINY, "--eval-every", "1", "--output", tmp_path / "a")
    assert code == 0, said
    lines = (tmp_path / "a" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    second = ["train", "task", "mqar", *MQAR, *TINY, "--start", tmp_path / "a", "--output", tmp_path / "b"]
    assert call(*second)[0] == 0
    assert loads((tmp_path / "b" / "result.json").read_text())["fingerprint"]["start"] == str(tmp_path / "a")
    code, said = call(*second, "--lr", "0.5")
    assert code == 2
    assert "--output" in said
    assert "holds a run with another lr" in said


def test_glue_goes_on_from_a_model_of_masked_text(text, tmp_path, call):
    """And from one that was tuned on another task of GLUE, whose classes may be others."""
    small = ["--width", "16", "--depth", "1", "--heads", "2", "--batch-size", "4", "--device", "cpu", "--mechanism",
             "lion"]  # fmt: skip
    for name, classes in (("three", 3), ("two", 2)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"sentence1": "a b", "sentence2": "c", "label": n % classes}) for n in range(6)]
        for part in ("train", "validation"):
            (tmp_path / name / f"{part}.jsonl").write_text("\n".join(lines))
    start = tmp_path / "mlm"
    call("train", "mlm", "--data", text, *small, "--recipe", "masked-text", "--steps", "1", "--length", "16",
         "--output", start)  # fmt: skip
    # epochs of 6 rows, 4 a step: 3, 3 and 10 of them
    for name, recipe, steps in (("three", "glue", 4), ("two", "glue-rte", 4), ("two", "glue-large-cola", 15)):
        out = tmp_path / recipe
        code, said = call("train", "task", "glue", "--data", tmp_path / name, *small, "--recipe", recipe, "--start",
                          start, "--output", out)  # fmt: skip
        assert code == 0, said
        assert f"after {steps} steps" in said
        start = out


def test_similar_sentences_are_learnt(tmp_path, call):
    """A number from one logit: the longer the first sentence, the higher."""
    rows = [{"sentence1": "a" * (n % 6), "sentence2": "b", "label": float(n % 6)} for n in range(48)]
    for part in ("train", "validation"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = ["--data", tmp_path, "--depth", "1", "--heads", "1", "--device", "cpu", "--set", "length=8",
             "--batch-size", "16"]  # fmt: skip
    one = ["--mechanism", "elu", "--width", "16", "--lr", "0.02", "--steps", "60", "--warmup-steps", "5"]
    code, said = call("train", "task", "stsb", *small, *one, "--output", tmp_path / "a")
    assert code == 0, said
    told = loads((tmp_path / "a" / "result.json").read_text())
    assert f"elu on stsb: Pearson {told['score']:.2f} % after 60 steps" in said
    assert told["score"] > 80
    assert told["records"][-1]["train_loss"] < 35 / 12, "less than the spread of the labels"


def host_of(*given):
    values = dict(zip(given[::2], given[1::2], strict=True))
    found = TrainTask.parse({"task": "listops", "device": "cpu", "set": {"train_examples": 8}} | values)
    shape = found.shape
    return shape["num_hidden_layers"], shape["hidden_size"], shape["num_attention_heads"], found.dropout


def test_a_recipe_that_is_named_brings_its_host():
    """What is given beside it stands; without its name a task has its small host."""
    assert host_of("recipe", "listops-s5", "depth", "1") == (1, 128, 2, 0)
    assert host_of("recipe", "listops") == (2, 64, 2, 0.1)
    assert host_of("recipe", "listops", "dropout", "0") == (2, 64, 2, 0)
    assert host_of("recipe", "listops-s5", "size", "pico") == (2, 64, 2, 0)
    assert host_of() == (2, 64, 2, 0)
    capo = {"task": "capo", "recipe": "capo-50k", "device": "cpu"}
    hosts = [TrainTask.parse(capo | more) for more in ({}, {"heads": "4"}, {"size": "pico"})]
    found = [(host.width, host.heads, host.head_dim, host.tied) for host in hosts]
    assert found == [(512, None, 64, True), (512, 4, None, True), (None, None, None, None)]
    other = TrainTask.parse({"task": "mqar", "recipe": "mad-recall", "device": "cpu"})  # of the same kind: its budget
    assert (other.width, other.lr, other.made.length) == (128, 5e-4, 64)  # and host, none of its settings


def test_a_recipe_that_is_not_named_brings_its_data_and_its_rates(text):
    """To one run and to a comparison alike; options that are given win."""
    one = CompareText.parse({"task": "mad-recall", "mechanisms": "elu", "device": "cpu"})
    assert (one.made.train_examples, one.steps, one.lr) == (12_800, 20_000, (5e-4,))
    few = CompareText.parse({"task": "mad-recall", "set": {"train_examples": 1280}, "lr": "0.1", "device": "cpu"})
    assert (few.made.train_examples, few.steps, few.lr) == (1280, 2000, (0.1,))
    assert few.min_lr == pytest.approx(0.1 * one.min_lr / 5e-4)
    wide = CompareText.parse({"task": "listops", "recipe": "listops-s5", "device": "cpu"})
    assert (wide.widths, wide.depth) == ((128,), 8)
    found = [CompareText.parse({"task": "listops", "device": "cpu"} | more).schedule
             for more in ({}, {"schedule": "cosine"})]  # fmt: skip
    assert found == ["linear", "cosine"]
    mlm = {"data": str(text), "length": "32", "device": "cpu"}
    found = [TrainMlm.parse(mlm | more) for more in ({}, {"set": {"share": 0.2}, "clip_norm": "0"})]
    assert [(one.made.share, one.made.length, one.clip_norm) for one in found] == [(0.3, 32, 1.0), (0.2, 32, None)]


PRECISE = {"precision": "fp32", "compile": False, "graphs": False, "attention_norm": None, "attention_gate": None}


def test_none_is_typed_for_a_norm_and_a_gate():
    given = {"task": "mqar", "attention_norm": "none", "attention_gate": "none", "canon": "none", "device": "cpu"}
    found = TrainTask.parse(given)
    assert {name: getattr(found, name) for name in PRECISE} == PRECISE
    assert (found.norm, found.canon) == (None, None)


ON_MQAR = ["train", "task", "mqar", *MQAR]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "task", "chess"], ["TASK: must be one of text", "mqar", "listops"]),
        (["train", "task", "mqar", "--set", "vocab"], ["--set", "key=value"]),
        (["train", "task", "mqar", "--set", "colour=1"], ["--set: colour", "is no option", "pairs"]),
        (["train", "task", "mqar", "--set", "pairs=a"], ["--set: pairs", "an integer"]),
        (["train", "task", "listops", "--set", "depth=0"], ["--set: depth", "at least 2"]),  # --depth is the model's
        (["train", "lm", "--data", "README.md", "--length", "1"], ["--length", "at least 2"]),
        ([*ON_MQAR, "--mechanism", "nobody"], ["--mechanism", "nobody"]),
        ([*ON_MQAR, "--hybrid", "gated*x"], ["--hybrid", "gated*3,softmax"]),
        ([*ON_MQAR, "--size", "pico", "--width", "65"], ["--width", "hidden_size = 65"]),
        (["train", "lm", "--data", "README.md", "--set", "evaluate=all"], ["--set: evaluate", "one of test, valid"]),
        ([*ON_MQAR, "--canon", "AQ"], ["--canon", "'Q'"]),
        ([*ON_MQAR, "--size", "huge"], ["--size", "pico"]),
        ([*ON_MQAR, "--attention-norm", "None"], ["--attention-norm: must be one of auto, none, layer", "got 'None'"]),
        ([*ON_MQAR, "--schedule", "sine"], ["--schedule: must be one of cosine, linear, got"]),
        ([*ON_MQAR, "--recipe", "secret"], ["--recipe", "listops"]),
        (["train", "lm", "--data", "README.md", "--length", "32", "--recipe", "listops"],
         ["--recipe: listops is for classification tasks, and text is causal", "one of language, mqar-64,"]),
        (["train", "lm", "--data", "nowhere.txt"], ["--data", "does not exist"]),
        (["train", "lm"], ["--data", "text needs a text file"]),
        (["train", "lm", "--data", "README.md", "--tokenizer", "gpt2"], ["--tokenizer: must be a folder with a token"]),
    ],
)  # fmt: skip
def test_a_bad_option_is_named_without_a_traceback(arguments, parts, tmp_path, call):
    code, said = call(*arguments, "--device", "cpu", "--output", tmp_path / "x")
    assert code == 2, said
    assert "Traceback" not in said
    assert all(part in said for part in parts), said
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, call):
    (tmp_path / "x").write_text("")
    code, said = call("train", "task", "mqar", "--device", "cpu", "--output", tmp_path / "x")
    assert code == 2
    assert "--output: must be a folder that can be written to" in said


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        (["lra-text"], ['{"text": "a", "label": 7}'], "train.jsonl: label must be one of 0, 1 or its number, got 7"),
        (["glue"], ['{"words": "a", "label": 0}'], "train.jsonl: a line needs one of sentence"),
        (["glue"], ["words"], "train.jsonl:1 is no JSON"),
        (["listops", "--set", "depth=2"], [], "change these settings"),
    ],
)
def test_data_that_make_no_sense_are_told_in_a_sentence(task, lines, message, tmp_path, call):
    """They are read when the first batch is asked for, long after the options were."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = ["--data", tmp_path] if lines else []
    code, said = call("train", "task", *task, *data, *TINY, "--output", tmp_path / "x")
    assert code == 2, said
    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_a_missing_extra_is_told_before_any_work(tmp_path, monkeypatch, call):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for command in (["train", "task", "mqar"], ["compare", "--task", "mqar"]):
        code, said = call(*command, *MQAR, "--device", "cpu", "--output", tmp_path / "x")
        assert code == 2
        assert "pip install 'linattn[" in said
    assert not (tmp_path / "x").exists()
