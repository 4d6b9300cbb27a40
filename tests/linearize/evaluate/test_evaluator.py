import pytest
import torch
from tests.linearize.evaluate.test_embeddings import Squares, Words
from tests.linearize.evaluate.tiny import Known

from linattn.linearize.evaluate.evaluator import Evaluator, Labelled
from linattn.linearize.evaluate.options import EvaluationOptions
from linattn.linearize.jobs.linearize_run import held_out_pieces
from linattn.linearize.training.text import TokenText
from linattn.support.options import OptionError


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
    for option, value in (("lengths", (1,)), ("contexts", (64, 70)), ("steps", 1), ("texts", 0)):
        with pytest.raises(OptionError) as error:
            EvaluationOptions(**{option: value}).check()
        assert error.value.option == option


def test_held_out_tokens_are_measured_as_they_were_read():
    """Written out and read again they would have lost the marks between documents."""
    text = TokenText(torch.arange(9), torch.arange(100))
    options = EvaluationOptions(lengths=(16,), texts=4)
    pieces = held_out_pieces(text, options)
    assert [len(piece) for piece in pieces] == [25, 25, 25, 25]
    measured = []

    def logits(ids):
        measured.append(ids[0].tolist())
        return torch.zeros(*ids.shape, 100)

    found = Evaluator(None, ["of words"] * 4, options, tell=lambda line: None, pieces=pieces)
    found._perplexities(Known(logits))
    assert measured == [piece[:16] for piece in pieces]
