"""The same figures at each stage, each of them kept as soon as it is known."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from tests.convert.evaluate.test_embeddings import Squares, Words
from tests.convert.evaluate.tiny import tiny_llama

from linattn.convert.convert import convert, plan_model
from linattn.convert.evaluate.embeddings import Labelled
from linattn.convert.evaluate.evaluator import FULL, EvaluationOptions, Evaluator
from linattn.convert.evaluate.needles import REPEATED, encoder, needle_texts, needles_found, text_haystack
from linattn.lab.cases import kept
from linattn.support.options import OptionError

NOTHING = {"lengths": (), "needle_lengths": (), "contexts": ()}


class Bytes:
    pad_token_id, eos_token_id = 0, None

    def __call__(self, text, return_tensors=None, **_):
        ids = list(text.encode())
        return {"input_ids": ids if return_tensors is None else torch.tensor([ids])}

    def decode(self, ids, **_):
        return ",".join(map(str, ids.tolist()))


def evaluator(folder, tokenizer, texts, said=None, options=None, **more):
    options = EvaluationOptions(**NOTHING | (options or {}))
    tell = (lambda line: None) if said is None else said.append
    return Evaluator(tokenizer, texts, options, keep=partial(kept, folder), tell=tell, **more)


def lolcats():
    model = tiny_llama()
    convert(model, plan_model(model, "lolcats", window=8))
    return model


class Other(Squares):
    """Its vectors have the other direction."""

    def forward(self, input_ids, attention_mask):
        output = super().forward(input_ids, attention_mask)
        output.last_hidden_state = -output.last_hidden_state
        return output


def test_an_encoder_is_compared_to_its_first_stage_and_figures_are_kept(tmp_path):
    labelled = Labelled(["aaa", "zzz", "aba", "zyz"] * 4, [0, 1, 0, 1] * 4, ["aab", "zzy", "aaa", "bab"], [0, 1, 0, 0])

    def begin(**options):
        texts = ["One two three four five six. Ten of them are here today now."]
        return evaluator(tmp_path, Words(), texts, options=options, causal=False, labelled=labelled)

    first = begin()
    teacher = first.stage("teacher", Squares())
    assert teacher["agreement"]["mean"] == pytest.approx(1.0)
    assert teacher["agreement"]["count"] == 2
    assert (teacher["probe"], teacher["probe_largest_class"]) == (100.0, 75.0)
    assert first.stage("transfer", Other())["agreement"]["mean"] == pytest.approx(-1.0)
    again = begin()
    assert again.stage("teacher", Squares()) == teacher
    assert again.stage("transfer", Squares())["agreement"]["mean"] == pytest.approx(-1.0)  # as it was written
    anew = begin(seed=1)
    anew.stage("teacher", Squares())
    assert anew.stage("transfer", Squares())["agreement"] == {"mean": 1.0, "tenth": 1.0, "least": 1.0, "count": 2}
    assert "probe" not in anew.stage("converted", Squares(), full=False)  # it costs more than all else
    assert anew.ablation(torch.nn.Identity(), "converted") is None


@pytest.mark.parametrize(
    ("option", "value"),
    [("contexts", (64, 70)), ("needle_lengths", (63,)), ("needle_haystacks", ("text", "text"))],
)
def test_wrong_options_are_named(option, value):
    with pytest.raises(OptionError) as error:
        EvaluationOptions(**{option: value})
    assert error.value.option == option


def test_figures_end_where_learned_positions_do():
    for most in (40, 64, 128, 1024):
        suited = EvaluationOptions().suited(1024, gpu=True, most=most)
        assert max(suited.lengths) <= most
        assert max(suited.contexts) + suited.decode_steps <= most
    found = EvaluationOptions().suited(1024, gpu=False, most=1024)
    assert (found.lengths, found.contexts) == ((1024,), (256, 512))
    for option, allowed in (("lengths", 1024), ("needle_lengths", 1024), ("contexts", 1008)):
        EvaluationOptions(**{option: (allowed,)}).suited(1024, gpu=False, most=1024)
        with pytest.raises(OptionError, match=f"must not exceed {allowed:,}, .* learned 1,024 positions") as error:
            EvaluationOptions(**{option: (allowed + 1,)}).suited(1024, gpu=False, most=1024)
        assert error.value.option == option


def test_an_interrupted_stage_goes_on_with_the_figure_it_was_at(tmp_path):
    model = lolcats()
    options = {"lengths": (8, 16), "needle_lengths": (230,), "contexts": (8,), "decode_steps": 2, "needle_count": 1}

    def begin(folder, calls_left):
        """An evaluator whose model is interrupted after so many calls."""
        calls = []

        def count(module, args, kwargs):
            calls.append(None)
            if len(calls) > calls_left:
                raise KeyboardInterrupt

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        return evaluator(folder, Bytes(), ["some words to read", "and a few more"], options=options), calls, hook

    done, whole, hook = begin(tmp_path / "whole", 10**6)
    stage, ablation = done.stage("finetune", model), done.ablation(model, "finetune")
    hook.remove()
    assert stage["perplexity"][0]["perplexity"] == ablation["variants"][FULL]["perplexity"][0]["perplexity"]
    spent = 0
    for calls_left in (3, 5, 7, 11, 20, 10**6):  # 2 windows twice, 5 needles, 3 pieces and steps; then the ablation
        made, calls, hook = begin(tmp_path / "parts", calls_left)
        with suppress(KeyboardInterrupt):
            again = made.stage("finetune", model), made.ablation(model, "finetune")
        hook.remove()
        spent += len(calls)
    for name in ("perplexity", "needle", "needle_by_length", "samples"):
        assert again[0][name] == stage[name]
    assert again[1] == ablation
    assert spent < 2 * len(whole)


def test_needles_in_both_haystacks_are_measured_apart(tmp_path):
    model, said = lolcats(), []
    texts = [f"Line {i} has some words of its own, and {i} more. " * 2 for i in range(20)]
    options = {"needle_lengths": (230, 260), "needle_haystacks": ("noise", "text"), "needle_count": 1}
    made = evaluator(tmp_path, Bytes(), texts, said, options)
    stage, ablation = made.stage("finetune", model, full=False), made.ablation(model, "finetune")
    places = [("noise", 230), ("noise", 260), ("text", 230), ("text", 260)]
    assert [(row["haystack"], row["length"]) for row in stage["needle_by_length"]] == places
    assert [row["count"] for row in stage["needle_by_length"]] == [5] * 4
    assert "needles found in text of 260 tokens: 0 %" in said
    encode = encoder(Bytes())
    for haystack, length in product((REPEATED, text_haystack(texts, encode, 260)), (230, 260)):
        expected = needle_texts(encode, length, count=1, haystack=haystack)
        own = [row for row in stage["needle"] if (row["haystack"], row["length"]) == (haystack.name, length)]
        assert own == needles_found(model, expected, length)
    worth = [each for each in ablation["worth"] if each["figure"] == "needle"]
    assert [(each["haystack"], each["length"]) for each in worth] == places
    again = evaluator(tmp_path, Bytes(), texts, options=options)
    assert again.stage("finetune", None, full=False) == stage  # as written


@pytest.mark.parametrize(
    ("texts", "options", "words", "option"),
    [
        (["word " * 80], {"needle_lengths": (230, 500)}, r"500 tokens.*got 399", "needle_haystacks"),
        (["a" * 300, "b" * 300], {"needle_lengths": (230, 500), "texts": 1}, "got 300", "needle_haystacks"),
        (["word " * 80], {"needle_lengths": (230, 64)}, r"none or at least 147 tokens, .* got 64", "needle_lengths"),
        (["too short"], {}, None, None),
    ],
)
def test_text_that_is_too_short_to_hide_a_needle_is_told_at_once(tmp_path, texts, options, words, option):
    begin = partial(evaluator, tmp_path, Bytes(), texts, options=options | {"needle_haystacks": ("text",)})
    if words is None:
        begin()
        return
    with pytest.raises(OptionError, match=words) as error:
        begin()
    assert error.value.option == option


def test_an_encoder_without_sentences_to_compare_is_told_at_once(tmp_path):
    with pytest.raises(OptionError, match="sentences of 6 to 60 words") as error:
        evaluator(tmp_path, Words(), ["Too short. And this."], causal=False)
    assert error.value.option == "eval_text"
    options = replace(EvaluationOptions(), needle_lengths=(230,), needle_haystacks=("text",))
    Evaluator(Words(), ["Long enough for the vector of a sentence."], options, causal=False)  # needles are not for it
