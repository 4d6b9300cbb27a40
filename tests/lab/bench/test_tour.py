import pytest

from linattn.lab.bench import contenders, tour
from linattn.lab.bench.tour import (
    DECAYS,
    TOLERANCE,
    Mechanisms,
    Tour,
    compare_forms,
    compare_hand_over,
    crossover_sentence,
)
from linattn.lab.screen import Screen
from linattn.mechanisms.registry import list_mechanisms


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_forms_agree_for_every_mask_and_decay(decay, causal):
    assert all(difference <= TOLERANCE for _, difference in compare_forms(decay, causal))


def test_a_broken_form_does_not_agree(monkeypatch):
    right = contenders.linear_attention

    def broken(*args, impl, **options):
        return right(*args, impl=impl, **options) * (1 + 1e-6 if impl == "recurrent" else 1)

    monkeypatch.setattr(contenders, "linear_attention", broken)
    assert all(difference > TOLERANCE for _, difference in compare_forms("none", causal=True))


def test_hand_over_agrees_wherever_it_is_cut():
    found = compare_hand_over()
    assert len(found) == 5
    assert all(difference <= TOLERANCE for _, difference in found)


def test_the_table_names_every_mechanism(capsys):
    assert Mechanisms().run(Screen()) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in list_mechanisms())


@pytest.mark.parametrize(
    ("softmax", "linear", "words"),
    [
        ({64: 1.0, 256: 16.0}, {64: 2.0, 256: 8.0}, "becomes faster at T = 128, and is 2.0x faster at 256"),
        ({64: 2.0, 256: 8.0}, {64: 1.0, 256: 2.0}, "at every length from T = 64; 4.0x at 256"),
        ({64: 1.0, 256: 1.0}, {64: 2.0, 256: 2.0}, "Softmax attention is the faster one up to T = 256 (2.0x"),
        ({}, {64: 1.0}, "no crossover"),
    ],
)
def test_the_crossover_in_words(softmax, linear, words):
    assert words in crossover_sentence(softmax, linear)


def test_the_tour_leaves_chart_and_results_and_fails_if_anything_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tour, "compare_hand_over", lambda: [("cut at 1", 1e-16)])
    monkeypatch.setattr(tour, "compare_forms", lambda decay, causal: [("values", 1e-16)])
    assert Tour(output=tmp_path, lengths=(32, 64)).run(Screen()) == 0
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "results.json").exists()
    assert "WRONG" not in capsys.readouterr().out
    monkeypatch.setattr(tour, "compare_forms", lambda decay, causal: [("values", float("nan"))])
    assert Tour(output=tmp_path, lengths=(32, 64)).run(Screen()) == 1
    assert "WRONG" in capsys.readouterr().out
