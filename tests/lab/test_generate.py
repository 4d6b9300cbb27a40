"""Text to text, and the command."""

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch

from linattn.lab.command import main
from models.language.small import build, greedy

pytest.importorskip("transformers", reason="the extra hf is not installed")


def call(*arguments):
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["generate", *map(str, arguments), "--device", "cpu", "--max-new-tokens", "5"])
    return SimpleNamespace(
        exit_code=code, stdout=out.getvalue(), stderr=err.getvalue(), output=out.getvalue() + err.getvalue()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of bytes whose answers are letters: the other bytes are made unlikely."""
    model = build(vocab_size=256, canon="ABCD", mechanism="gated").float()
    with torch.no_grad():
        model.lm_head.weight[:97] = model.lm_head.weight[123:] = 0
        model.lm_head.weight *= 3
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def test_bytes_in_bytes_out(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = greedy(model, torch.tensor([list(b"hello ")]), 5)[0]
    result = call(folder, "--prompt", "hello ")
    assert result.exit_code == 0, result.output
    assert bytes(expected.tolist()).decode(errors="replace") in result.stdout


def test_no_bar_is_shown_and_what_is_wrong_with_weights_still_is(folder, tmp_path):
    """In a process of its own: transformers keeps the stderr that it found."""
    from safetensors.torch import load_file, save_file

    def told(path):
        words = [
            sys.executable,
            "-c",
            "from linattn.lab.command import main; main()",
            "generate",
            path,
            "--prompt",
            "a",
            "--max-new-tokens",
            "1",
        ]
        done = subprocess.run([*words, "--device", "cpu"], capture_output=True, text=True, check=True)
        return done.stderr

    assert "%|" not in told(folder)
    copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.colour": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    warned = told(tmp_path)
    assert "model.colour" in warned
    assert "%|" not in warned


def test_bars_are_shown_again_behind_the_command(folder):
    from transformers.utils import logging

    assert logging.is_progress_bar_enabled()
    result = call(folder, "--prompt", "a")
    assert result.exit_code == 0
    assert "%|" not in result.stderr
    assert logging.is_progress_bar_enabled()


def test_prompts_of_one_batch_do_not_change_one_another(folder):
    both = call(folder, "--prompt", "a", "--prompt", "much longer", "--prefill-chunk", 4).stdout
    assert both == call(folder, "--prompt", "a").stdout + call(folder, "--prompt", "much longer").stdout


def test_a_text_that_ends_is_cut_there():
    """What pads the rows that ended sooner is a byte like any other."""
    from linattn.lab.generate import Generate, TextModel

    class Ends:
        device = "cpu"
        generation_config = SimpleNamespace(eos_token_id=256)

        def generate(self, ids, **_):
            return torch.cat([ids, torch.tensor([[97, 256, 0, 0], [98, 98, 0, 98]])], dim=1)

    model = TextModel(Ends(), lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), 0)
    command = Generate(checkpoint=Path("x"), prompt=("x", "longer"), max_new_tokens=4)
    assert command.complete(model) == ["a", "bb\0b"]


def test_draws_follow_the_seed(folder):
    options = ("--prompt", "hello ", "--temperature", 2.0, "--top-k", 20)
    texts = [call(folder, *options, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_tokenizer_beside_the_model_is_taken(folder, tmp_path):
    """Without what it puts around a text, such as the end of it: in training there was nothing of the kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "zero": 1, "one": 2} | {f"w{i}": i for i in range(3, 256)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A w9", special_tokens=[("w9", 9)])
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.save_pretrained(tmp_path)
    new = greedy(model, torch.tensor([[2, 1]]), 5)[0, 2:].tolist()
    names = {index: word for word, index in words.items()}
    assert " ".join(names[index] for index in new) in call(tmp_path, "--prompt", "one zero").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", -1), "must be at least 0, got -1"),
        (("--temperature", "nan"), "must be at least 0, got nan"),
        (("--temperature", "inf"), "must be at least 0, got inf"),
        (("--top-p", 0), "at most 1 and above 0"),
        (("--top-p", 0.9), "needs a temperature above 0"),
        (("--top-k", 3), "needs a temperature above 0"),
        (("--seed", -1), "got -1"),
        (("--seed", 2**32), "got 4294967296"),
        (("--beams", 0), "must be at least 1, got 0"),
        (("--precision", "fp8"), "fp32, bf16"),
    ],
)
def test_bad_options_are_named(folder, options, message):
    result = call(folder, "--prompt", "a", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert options[0] in result.output


def test_bad_folders_and_prompts_are_named(folder, tmp_path):
    for result, words in (
        (call(tmp_path, "--prompt", "a"), "CHECKPOINT: must be a folder with config.json"),
        (call(folder, "--prompt", ""), "at least one token"),
    ):
        assert result.exit_code == 2
        assert words in result.output
    (tmp_path / "config.json").write_text("{")
    result = call(tmp_path, "--prompt", "a")
    assert result.exit_code == 2
    assert "CHECKPOINT: " in result.output
    assert "is no JSON" in " ".join(result.output.split())
    build().save_pretrained(tmp_path)
    result = call(tmp_path, "--prompt", "a")
    assert result.exit_code == 2
    assert "40 tokens are too few for bytes" in " ".join(result.output.split())


def test_a_folder_that_transformers_cannot_read_is_named(folder, tmp_path):
    """No model type; no weights; weights that are none; weights of another width; a tokenizer that is none."""
    from safetensors.torch import load_file, save_file

    def told():
        result = call(tmp_path, "--prompt", "a")
        assert result.exit_code == 2
        assert "CHECKPOINT: cannot be read as a language model" in result.output
        return " ".join(result.output.replace("│", " ").split())

    (tmp_path / "config.json").write_text("{}")
    assert "model_type" in told()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "model.safetensors" in told()
    (tmp_path / "model.safetensors").write_bytes(b"half of a file")
    told()
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    told()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "tokenizer.json").write_text("{}")
    told()


def test_a_text_longer_than_the_places_is_refused_before_it_is_written(tmp_path):
    """Seven places: of a prompt of 3 and 5 new tokens all but the last one are read."""
    build(vocab_size=256, max_position_embeddings=7, rotary=0).save_pretrained(tmp_path)
    assert call(tmp_path, "--prompt", "abc").exit_code == 0
    result = call(tmp_path, "--prompt", "abc", "--prompt", "abcd")
    assert result.exit_code == 2
    words = "--max-new-tokens: must leave room for a prompt of 4 tokens in max_position_embeddings = 7, got 5"
    assert words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("head", "causal", "words"),
    [("ForMaskedLM", False, "this is an encoder"), ("ForSequenceClassification", True, "lm_head.weight is not there")],
)
def test_a_model_that_cannot_write_is_refused(tmp_path, head, causal, words):
    """A head that is not in the folder would be drawn at random."""
    build(head, vocab_size=256, causal=causal).save_pretrained(tmp_path)
    result = call(tmp_path, "--prompt", "a")
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
