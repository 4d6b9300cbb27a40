import pytest

from linattn.lab.bench import problems, tour
from linattn.lab.bench.tour import TOLERANCE, Tour, compare_forms, compare_hand_over
from linattn.lab.screen import Screen


def test_a_broken_form_does_not_agree(monkeypatch):
    right = problems.linear_attention

    def broken(*args, impl, **options):
        return right(*args, impl=impl, **options) * (1 + 1e-6 if impl == "recurrent" else 1)

    monkeypatch.setattr(problems, "linear_attention", broken)
    assert all(difference > TOLERANCE for _, difference in compare_forms("none", causal=True))


@pytest.mark.parametrize("function", ["linear_attention_with_state", "linear_attention_step"])
def test_hand_over_agrees_wherever_it_is_cut_unless_the_state_is_lost(monkeypatch, function):
    found = compare_hand_over()
    assert len(found) == 5
    assert all(difference <= TOLERANCE for _, difference in found)
    right = getattr(tour, function)
    monkeypatch.setattr(tour, function, lambda *args, **options: (right(*args, **options)[0], None))
    wrong = {what for what, difference in compare_hand_over() if not difference <= TOLERANCE}
    assert wrong == {what for what, _ in found if ("token" in what) == ("step" in function)}


def test_the_tour_fails_if_anything_is_wrong(monkeypatch, capsys):
    assert Tour().run(Screen()) == 0
    assert "WRONG" not in capsys.readouterr().out
    monkeypatch.setattr(tour, "compare_forms", lambda decay, causal: [("values", float("nan"))])
    assert Tour().run(Screen()) == 1
    assert "WRONG" in capsys.readouterr().out
