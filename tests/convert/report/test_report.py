import json
from pathlib import Path

import pytest
from tests.lab.pages.html_page import parse

from linattn.lab.convert.report.charts import charts_of
from linattn.lab.convert.report.page import page, write_report
from linattn.lab.convert.report.tables import verdict
from linattn.support.options import OptionError

RESULTS = Path(__file__).parents[3] / "results"


def rows_of(section):
    return [row.text.strip() for row in section.find("tr")]


def stage(name, perplexity, found, cache, speed, text):
    return {
        "name": name,
        "perplexity": [{"length": n, "perplexity": perplexity * n / 256} for n in (256, 512)],
        "needle_by_length": [{"length": 256, "found": found}],
        "decoding": [
            {"context": n, "cache_bytes": cache(n), "tokens_per_second": speed} for n in (1024, 2048)
        ],
        "samples": [{"prompt": "Once <b>", "text": text}],
    }  # fmt: skip


@pytest.fixture
def results():
    return {
        "meta": {"model": "tiny", "method": "still", "converted": 2, "training_tokens": 5000, "command": "linattn x"},
        "plan": {"method": "still", "layers": {"0": {"kind": "hybrid", "ratio": 0.0625}, "1": {"kind": "hybrid"}}},
        "stages": [
            stage("teacher", 15.0, 1.0, lambda n: 1024 * n, 20.0, "upon a time"),
            stage("finetune", 16.5, 0.5, lambda n: 2**18, 30.0, "there & <i>then"),
        ],
        "transfer": [
            {"layer": i, "before": 0.5, "after": 0.05 * (i + 1), "losses": [0.5, 0.2, 0.1]} for i in range(2)
        ],
        "ablation": {
            "variants": {
                "as converted": {"perplexity": [{"length": 256, "perplexity": 16.5}]},
                "without the linear part": {"perplexity": [{"length": 256, "perplexity": 17.5}]},
            },
            "worth": [
                {"figure": "perplexity", "length": 256, "without": "without the linear part", "gain": 0.06,
                 "error": 0.01, "counts": True},
                {"figure": "needle", "length": 256, "without": "without the linear part", "gain": 0.0,
                 "error": 0.2, "counts": False},
            ],
        },
    }  # fmt: skip


def test_the_page_stands_alone_and_shows_every_figure(results):
    root = parse(page(results))
    assert "default-src 'none'" in root.find("meta")[1].attributes["content"]
    assert not root.find("img")
    assert not any(value.startswith(("http", "//")) for node in root.nodes() for value in node.attributes.values())
    stages = root.find("section", id="stages")[0].text
    for figure in ("15.000", "16.500", "100", "50", "2 MiB", "256 KiB", "30.0"):
        assert figure in stages
    layers = root.find("section", id="layers")[0].text
    assert "np features, window 64, 1/16 kept" in layers
    assert "0.1000" in layers
    ablation = root.find("section", id="ablation")[0].text
    assert "+0.0600 ± 0.0100" in ablation
    assert "(may be chance)" in ablation
    samples = root.find("section", id="samples")[0].text
    assert "Once <b>" in samples
    assert "there & <i>then" in samples
    assert {"quality", "cost", "transfer"} <= {node.attributes.get("id") for node in root.find("section")}


def test_the_sentence_says_what_was_lost_and_what_does_not_work(results):
    said = verdict(results)
    assert "went from 15.00 to 16.50 (+10.0 %)" in said
    assert "After 2,048 tokens the cache holds 256 KiB, the teacher's 2 MiB" in said
    assert "1.50 times" in said
    assert "What the linear part adds to retrieval is not more than chance." in said
    assert "adds to perplexity" not in said


def test_needles_in_both_haystacks_are_told_apart(results):
    for each, text in zip(results["stages"], (0.9, 0.7), strict=True):
        each["needle_by_length"] += [{"haystack": "text", "length": 256, "found": text}]
    variants, worth = results["ablation"]["variants"], results["ablation"]["worth"]
    for name, noise, text in (("as converted", 0.5, 0.7), ("without the linear part", 0.51, 0.31)):
        variants[name]["needle_by_length"] = [
            {"length": 256, "found": noise}, {"haystack": "text", "length": 256, "found": text},
        ]  # fmt: skip
    worth.append({**worth[-1], "haystack": "text", "gain": 0.39, "error": 0.1, "counts": True})
    root = parse(page(results))
    stages = rows_of(root.find("section", id="stages")[0])
    assert any("needles found in noise" in head and "needles found in text" in head for head in stages)
    assert any("100" in row and "90" in row for row in stages)
    assert any("50" in row and "70" in row for row in stages)
    without = next(row for row in rows_of(root.find("section", id="ablation")[0]) if row.startswith("without"))
    assert [figure for figure in ("51", "31", "+0.00 ± 0.20 (may be chance)", "+0.39 ± 0.10") if figure in without] == [
        "51", "31", "+0.00 ± 0.20 (may be chance)", "+0.39 ± 0.10",
    ]  # fmt: skip
    assert "What the linear part adds to retrieval in noise is not more than chance." in verdict(results)
    assert "retrieval in text" not in verdict(results)
    quality = next(chart for chart in charts_of(results) if chart.name == "quality")
    assert "noise is five sentences that repeat" in quality.reading
    panels = quality.panels
    assert [panel.alt for panel in panels[1:]] == [
        "Needles found in noise, % at 256 tokens of the text: teacher 100; finetune 50.",
        "Needles found in text, % at 256 tokens of the text: teacher 90; finetune 70.",
    ]


WITHOUT_HAYSTACKS = [
    path for path in sorted(RESULTS.glob("*/linearize-*-still*.json")) if '"haystack"' not in path.read_text()
]


@pytest.mark.parametrize("path", WITHOUT_HAYSTACKS, ids=lambda path: path.stem)
def test_results_without_haystacks_are_shown_as_before(path):
    results = json.loads(path.read_text())
    root = parse(page(results))
    last = results["stages"][-1]["needle_by_length"]
    shown = [row for row in rows_of(root.find("section", id="stages")[0]) if row.startswith("finetune")]
    assert all(f"{100 * row['found']:.0f}" in shown[0] for row in last)
    assert "in noise" not in root.text
    assert len(next(chart for chart in charts_of(results) if chart.name == "quality").panels) == (2 if last else 1)


def test_charts_say_in_words_what_they_draw_and_are_written_beside_the_page(results, tmp_path):
    cost = next(chart for chart in charts_of(results) if chart.name == "cost")
    assert "teacher 1 MiB to 2 MiB; finetune 256 KiB to 256 KiB" in cost.panels[0].alt
    (tmp_path / "report.json").write_text(json.dumps(results))
    first = write_report(tmp_path).read_bytes()
    assert (tmp_path / "charts" / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert write_report(tmp_path).read_bytes() == first


def test_dimensions_that_were_chosen_by_degrees_of_freedom_are_charted(results):
    assert "freedom" not in {chart.name for chart in charts_of(results)}
    results["degrees"] = {"layers": [{"layer": 0, "degrees": [2.0, 30.0]}, {"layer": 1, "degrees": [4.0, 10.0]}]}
    results["plan"]["layers"] = {"0": {"kind": "hybrid", "feature_dim": 48}, "1": {"kind": "hybrid", "feature_dim": 16}}
    freedom, given = next(chart for chart in charts_of(results) if chart.name == "freedom").panels
    assert "mean head 16 to 7; widest head 30 to 10" in freedom.alt
    assert "dimension 48 to 16" in given.alt


def test_a_report_of_little_is_still_a_page(tmp_path):
    root = parse(
        page({"meta": {}, "stages": [{"name": "teacher", "perplexity": [{"length": 8, "perplexity": "inf"}]}]})
    )
    assert root.find("h1")
    assert not root.find("section", id="samples")
    with pytest.raises(OptionError, match=r"report\.json"):
        write_report(tmp_path)
