"""What reports and tables say of comparisons on text, where it is not what they say of images."""

from io import StringIO
from typing import Any

from rich.console import Console

from linattn.lab.compare.screen import final_table
from linattn.lab.pages.charts_cost import cost_chart
from linattn.lab.pages.page import page as page_text
from linattn.lab.pages.read import Comparison
from linattn.lab.pages.setting import setting_sentence

METRIC = {"field": "score", "name": "bits per byte", "unit": "", "decimals": 3, "higher": False}


def made_results() -> dict[str, Any]:
    scores, states = {"softmax": 1.5, "elu": 2.0}, {"softmax": 8 * 2**20, "elu": 3 * 2**10}
    rows = [{"mechanism": name, "seed": 0, "status": "done", "score": score} for name, score in scores.items()]
    entries = [
        {"mechanism": name, "runs": 1, "score_mean": score, "score_std": None, "score_min": score, "score_max": score,
         "state_bytes": states[name]}
        for name, score in scores.items()
    ]  # fmt: skip
    meta = {"kind": "text", "metric": METRIC, "data": {"name": "text", "valid": 0.05, "test": 0.05}, "finished": True}
    return {"meta": meta, "mechanisms": entries, "rows": rows}


def test_shares_of_a_text_are_not_counted_as_images() -> None:
    said = setting_sentence(Comparison(made_results()))
    assert "on text" in said
    assert "images" not in said


def test_states_are_counted_in_the_same_unit_everywhere() -> None:
    results = made_results()
    chart = cost_chart(Comparison(results))
    assert chart is not None
    assert any(panel.alt.startswith("State of one sequence, KiB: softmax 8,192.00; elu 3.00") for panel in chart.panels)
    page = page_text(results, None)
    assert "KiB per sequence" in page
    assert "kB per sequence" not in page
    screen = StringIO()
    Console(file=screen, width=160).print(final_table(results))
    assert "8 MiB" in screen.getvalue()
    assert "3 KiB" in screen.getvalue()
