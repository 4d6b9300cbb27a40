from io import StringIO

import pytest
from linattn.lab.bench.agreement import compare_all_forms, compare_forms, compare_hand_over
from linattn.lab.bench.catalog import mechanism_table
from linattn.lab.bench.rows import Result, Row
from rich.console import Console

from linattn.lab.bench import contenders
from linattn.lab.bench import tour as tour_module
from linattn.lab.bench.tour import agreement_table, crossover_sentence, tour
from linattn.mechanisms.registry import list_mechanisms


def printed(*things, width=80):
    screen = StringIO()
    Console(file=screen, width=width).print(*things)
    return screen.getvalue()


def test_forms_agree_for_every_mask_and_decay():
    found = compare_all_forms()
    assert len(found) == 8
    assert all(a.ok for a in found)
    assert "WRONG" not in printed(agreement_table(found))


def test_a_broken_form_does_not_agree(monkeypatch):
    right = contenders.linear_attention

    def broken(*args, impl, **options):
        return right(*args, impl=impl, **options) * (1 + 1e-6 if impl == "recurrent" else 1)

    monkeypatch.setattr(contenders, "linear_attention", broken)
    found = compare_forms("none", causal=True)
    assert not found.ok
    assert "WRONG" in printed(agreement_table([found]))


def test_hand_over_agrees_wherever_it_is_cut():
    found = compare_hand_over()
    assert len(found) == 5
    assert all(h.ok for h in found)


def test_the_table_names_every_mechanism_on_a_small_screen():
    text = printed(mechanism_table())
    assert all(name in text for name in list_mechanisms())


@pytest.mark.parametrize(
    ("softmax", "linear", "point", "words"),
    [
        ({64: 1.0, 256: 16.0}, {64: 2.0, 256: 8.0}, 128, "becomes faster at T = 128, and is 2.0x faster at 256"),
        ({64: 2.0, 256: 8.0}, {64: 1.0, 256: 2.0}, 64, "at every length from T = 64; 4.0x at 256"),
        ({64: 1.0, 256: 1.0}, {64: 2.0, 256: 2.0}, None, "Softmax attention is the faster one up to T = 256 (2.0x"),
        ({}, {64: 1.0}, None, "no crossover"),
    ],
)
def test_the_crossover_in_words(softmax, linear, point, words):
    result = Result({})
    for name, times in (("sdpa", softmax), ("chunked", linear)):
        for length, ms in times.items():
            result.add(Row(name, length, "forward", "ok", median_ms=ms))
    found, sentence = crossover_sentence(result)
    assert found == (None if point is None else pytest.approx(point))
    assert words in sentence


def test_the_tour_leaves_chart_and_results(tmp_path):
    screen = StringIO()
    assert tour(tmp_path, Console(file=screen, width=80), lengths=(32, 64)) == 0
    assert (tmp_path / "crossover.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "crossover.json").exists()
    text = screen.getvalue()
    assert "crossover.png" in text
    assert "crossover.json" in text
    assert "WRONG" not in text


def test_the_tour_fails_if_anything_is_wrong(tmp_path, monkeypatch):
    wrong = [tour_module.Agreement("none", True, 1.0, float("nan"))]
    monkeypatch.setattr(tour_module, "compare_all_forms", lambda: wrong)
    screen = StringIO()
    assert tour(tmp_path, Console(file=screen, width=80), lengths=(32,)) == 1
    assert "WRONG" in screen.getvalue()
