import json
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.convert.evaluate.test_embeddings import Squares, Words
from tests.convert.evaluate.tiny import Known, tiny_llama

from linattn.convert.convert import convert, plan_model
from linattn.convert.evaluate.ablation import FULL
from linattn.convert.evaluate.evaluator import Evaluator, Labelled
from linattn.convert.evaluate.needle import needles_found
from linattn.convert.evaluate.needle_text import encoder, needle_texts
from linattn.convert.evaluate.options import EvaluationOptions
from linattn.convert.training.data import TokenText
from linattn.lab.convert.jobs.linearize_run import held_out_pieces
from linattn.support.options import OptionError


class Bytes:
    pad_token_id, eos_token_id = 0, None

    def __call__(self, text, return_tensors=None, **_):
        ids = list(text.encode())
        return {"input_ids": ids if return_tensors is None else torch.tensor([ids])}

    def decode(self, ids, **_):
        return ",".join(map(str, ids.tolist()))


def evaluator(tmp_path, **options):
    labelled = Labelled(["aaa", "zzz", "aba", "zyz"] * 4, [0, 1, 0, 1] * 4, ["aab", "zzy", "aaa", "bab"], [0, 1, 0, 0])
    texts = ["One two three four five six. Ten of them are here today now."]
    return Evaluator(Words(), texts, EvaluationOptions(**options), causal=False, path=tmp_path / "done.json",
                     tell=lambda line: None, labelled=labelled)  # fmt: skip


class Other(Squares):
    """Its vectors have the other direction."""

    def forward(self, input_ids, attention_mask):
        output = super().forward(input_ids, attention_mask)
        output.last_hidden_state = -output.last_hidden_state
        return output


def test_an_encoder_is_compared_to_its_first_stage_and_finished_stages_are_kept(tmp_path):
    first = evaluator(tmp_path)
    teacher = first.stage("teacher", Squares())
    assert teacher["agreement"]["mean"] == pytest.approx(1.0)
    assert teacher["agreement"]["count"] == 2
    assert (teacher["probe"], teacher["probe_largest_class"]) == (100.0, 75.0)
    assert first.stage("transfer", Other())["agreement"]["mean"] == pytest.approx(-1.0)
    again = evaluator(tmp_path)
    assert again.stage("teacher", Squares()) == teacher
    assert again.stage("transfer", Squares())["agreement"]["mean"] == pytest.approx(-1.0)  # as it was written
    anew = evaluator(tmp_path, sentences=1)
    anew.stage("teacher", Squares())
    assert anew.stage("transfer", Squares())["agreement"] == {"mean": 1.0, "tenth": 1.0, "least": 1.0, "count": 1}
    assert "probe" not in anew.stage("converted", Squares(), full=False)  # it costs more than all else
    assert anew.ablation(torch.nn.Identity()) is None


def test_the_texts_of_an_encoder_are_cut_to_the_longest_length(tmp_path):
    whole, cut = (evaluator(tmp_path, lengths=lengths) for lengths in ((), (2,)))
    assert not torch.equal(whole._vectors(Squares()), cut._vectors(Squares()))


def test_wrong_options_are_named():
    for option, value in (("lengths", (1,)), ("contexts", (64, 70)), ("steps", 1), ("texts", 0),
                          ("needle_haystacks", ("noise", "hay")), ("needle_haystacks", ("text", "text"))):  # fmt: skip
        with pytest.raises(OptionError) as error:
            EvaluationOptions(**{option: value}).check()
        assert error.value.option == option


def test_figures_end_where_learned_positions_do():
    for most in (40, 64, 128, 1024):
        EvaluationOptions.suited(1024, True, {}, most).check(most)
    found = EvaluationOptions.suited(1024, False, {}, 1024)
    assert (found.lengths, found.contexts) == ((1024,), (256, 512))
    for option, allowed in (("lengths", 1024), ("needle_lengths", 1024), ("contexts", 1008)):
        EvaluationOptions(**{option: (allowed,)}).check(1024)
        with pytest.raises(OptionError, match=f"must not exceed {allowed:,}, .* learned 1,024 positions") as error:
            EvaluationOptions(**{option: (allowed + 1,)}).check(1024)
        assert error.value.option == option


def test_an_encoder_without_sentences_to_compare_is_told_at_once():
    with pytest.raises(OptionError, match="sentences of 6 to 60 words") as error:
        Evaluator(Words(), ["Too short. And this."], EvaluationOptions(), causal=False)
    assert error.value.option == "eval_text"


def test_held_out_tokens_are_measured_as_they_were_read():
    """Written out and read again they would have lost the marks between documents."""
    text = TokenText(torch.arange(9), torch.arange(100))
    options = EvaluationOptions(lengths=(16,), texts=4)
    pieces = held_out_pieces(text, options)
    assert [len(piece) for piece in pieces] == [25, 25, 25, 25]
    measured = []

    def logits(ids):
        measured.extend(ids.tolist())
        return torch.zeros(*ids.shape, 100)

    found = Evaluator(None, ["of words"] * 4, options, tell=lambda line: None, pieces=pieces)
    found._perplexities("teacher", Known(logits))
    assert measured == [piece[:16] for piece in pieces]


def test_an_interrupted_stage_goes_on_with_the_figure_it_was_at(tmp_path):
    model = tiny_llama()
    convert(model, plan_model(model, "lolcats", window=8))
    options = EvaluationOptions(lengths=(8, 16), needle_lengths=(230,), contexts=(8,), steps=2, needle_count=1)

    def begin(calls_left):
        """An evaluator whose model is interrupted after so many calls."""
        calls = []

        def count(module, args, kwargs):
            calls.append(None)
            if len(calls) > calls_left:
                raise KeyboardInterrupt

        found = Evaluator(Bytes(), ["some words to read", "and a few more"], options, path=tmp_path / "done.json",
                          tell=lambda line: None)  # fmt: skip
        return found, calls, model.register_forward_pre_hook(count, with_kwargs=True)

    done, whole, hook = begin(10**6)
    stage, ablation = done.stage("finetune", model), done.ablation(model, "finetune")
    hook.remove()
    (tmp_path / "done.json").unlink()
    assert stage["perplexity"][0]["perplexity"] == ablation["variants"][FULL]["perplexity"][0]["perplexity"]
    spent = 0
    for calls_left in (3, 5, 7, 11, 20, 10**6):  # 2 windows twice, 5 needles, 3 pieces and steps; then the ablation
        found, calls, hook = begin(calls_left)
        with suppress(KeyboardInterrupt):
            again = found.stage("finetune", model), found.ablation(model, "finetune")
        hook.remove()
        spent += len(calls)
    for name in ("perplexity", "needle", "needle_by_length", "samples"):
        assert again[0][name] == stage[name]
    assert again[1] == ablation
    assert spent < 2 * len(whole)


def test_needles_in_both_haystacks_are_measured_apart(tmp_path):
    model = tiny_llama()
    convert(model, plan_model(model, "lolcats", window=8))
    texts = [f"Line {i} has some words of its own, and {i} more. " * 2 for i in range(20)]
    options = EvaluationOptions(
        needle_lengths=(230, 260), needle_haystacks=("noise", "text"), needle_count=1, prompts=0
    )
    said = []
    found = Evaluator(Bytes(), texts, options, path=tmp_path / "done.json", tell=said.append)
    stage, ablation = found.stage("finetune", model, full=False), found.ablation(model, "finetune")
    places = [("noise", 230), ("noise", 260), ("text", 230), ("text", 260)]
    assert [(row["haystack"], row["length"]) for row in stage["needle_by_length"]] == places
    assert [row["count"] for row in stage["needle_by_length"]] == [5] * 4
    assert "needles found in text of 260 tokens: 0 %" in said
    # Each row has the figures of its own texts.
    assert found._needles_of(found._haystacks[0], 230) == needle_texts(encoder(Bytes()), 230, count=1, digits=5)
    for haystack, length in product(found._haystacks, (230, 260)):
        made = needle_texts(encoder(Bytes()), length, count=1, digits=5, haystack=haystack)
        own = [row for row in stage["needle"] if (row["haystack"], row["length"]) == (haystack.name, length)]
        assert own == [row.as_dict() for row in needles_found(model, made, length)]
    worth = [each for each in ablation["worth"] if each["figure"] == "needle"]
    assert [(each["haystack"], each["length"]) for each in worth] == places
    again = Evaluator(Bytes(), texts, options, path=tmp_path / "done.json", tell=said.append)
    assert again.stage("finetune", None, full=False) == stage  # as it was written, text and noise


def test_text_that_is_too_short_to_hide_a_needle_is_told_at_once():
    options = EvaluationOptions(needle_lengths=(230, 500), needle_haystacks=("text",))
    with pytest.raises(OptionError, match=r"500 tokens.*got 399") as error:
        Evaluator(Bytes(), ["word " * 80], options)
    assert error.value.option == "needle_haystacks"
    with pytest.raises(OptionError, match="got 300"):  # of the texts that are measured on
        Evaluator(Bytes(), ["a" * 300, "b" * 300], replace(options, texts=1))
    with pytest.raises(OptionError, match=r"none or at least 147 tokens, .* got 64") as error:
        Evaluator(Bytes(), ["word " * 80], EvaluationOptions(needle_lengths=(230, 64)))
    assert error.value.option == "needle_lengths"
    Evaluator(Bytes(), ["too short"], replace(options, needle_lengths=()))
    Evaluator(Words(), ["Long enough for the vector of a sentence."], options, causal=False)


def test_files_without_a_haystack_go_on_as_noise(tmp_path):
    """Their fingerprint and rows are those of options that had no word on it."""
    row = {"length": 230, "depth": 0.5, "found": 0.25, "tokens_right": 0.5, "nats": "inf", "count": 1}
    kept = {"fingerprint": "d1cfe156670f8d93453ad684", "stages": {}, "figures": {"teacher: needle 230": [row]}}
    (tmp_path / "done.json").write_text(json.dumps(kept))
    options = EvaluationOptions(needle_lengths=(230,), needle_count=1)

    def begin(options):
        return Evaluator(Bytes(), ["some words to read"], options, path=tmp_path / "done.json", tell=lambda line: None)

    (found,) = begin(options).stage("teacher", None, full=False)["needle_by_length"]
    assert (found["haystack"], found["found"], found["nats"]) == ("noise", 0.25, float("inf"))
    other = begin(replace(options, needle_haystacks=()))
    assert not other._kept.figures  # other options are begun anew
