"""The page says what the JSON says, needs nothing from outside and is the same each time."""

import json
import re
from math import log

import pytest

from lab.pages.fixtures import (
    EPOCHS,
    LAYERS,
    MECHANISMS,
    SEEDS,
    TOKENS,
    make_examples,
    make_results,
    make_unfinished,
    write_folder,
)
from lab.pages.html_page import Node, parse, table_of
from linattn.lab.pages import write_report
from linattn.lab.pages.details import STATISTICS
from linattn.lab.pages.page import page as page_text

# Each of these would open a box, close an attribute or end a script if it came through as it is.
NASTY = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</script></style></title><b>&amp;",
    "$\\frac{1}{2}$ & ' `",
]


@pytest.fixture(scope="module")
def text() -> str:
    return page_text(make_results(), make_examples())


@pytest.fixture(scope="module")
def page(text) -> Node:
    return parse(text)


def test_results_table_has_the_numbers_of_the_json(page):
    table = table_of(page, "Results")
    assert list(table) == list(MECHANISMS)
    for entry in make_results()["mechanisms"]:
        row = table[entry["mechanism"]]
        expected = f"{entry['top1_mean']:.2f} ± {entry['top1_std']:.2f} {entry['top1_min']:.2f}–{entry['top1_max']:.2f}"
        assert row["top-1"] == f"{expected}, 3 seeds"
        assert float(row["parameters"]) == pytest.approx(entry["parameters"] / 1e6, abs=5e-4)
        assert float(row["operations"]) == pytest.approx(entry["flops"] / 1e6, abs=0.5)
        assert int(row["forward"].replace(",", "")) == round(entry["images_per_second_forward"])
        assert int(row["training"].replace(",", "")) == round(entry["images_per_second_train"])
        assert float(row["peak memory"].replace(",", "")) == pytest.approx(entry["peak_bytes_train"] / 2**20, abs=0.05)
        if entry["mechanism"] == "softmax":
            assert (row["state"], row["entropy gap"]) == ("–", "–")
            assert "reference" in row["mechanism"]
        else:
            assert float(row["state"]) == pytest.approx(entry["state_size"] / 1e3, abs=0.05)
            assert float(row["entropy gap"]) == pytest.approx(entry["entropy_gap"], abs=0.005)
            assert "reference" not in row["mechanism"]


def test_columns_are_sorted_by_what_the_json_says_and_not_by_rounded_text(page):
    (box,) = page.find("div", aria_label="Results")
    values = [row.find("td")[0].attributes["data-value"] for row in box.find("tbody")[0].find("tr")]
    assert list(map(float, values)) == [entry["top1_mean"] for entry in make_results()["mechanisms"]]


def test_statistics_are_means_over_the_heads_that_have_one(page):
    for field, (title, _, decimals) in STATISTICS.items():
        table = table_of(page, title)
        for entry in make_results()["mechanisms"]:
            for i, layer in enumerate(entry["layers"], 1):
                heads = [value for value in layer[field] if value is not None]
                shown = table[entry["mechanism"]][f"layer {i}"]
                if not heads:
                    assert shown == "–"
                else:
                    mean = sum(heads) / len(heads)
                    assert float(shown.replace("−", "-")) == pytest.approx(mean, abs=0.51 * 10**-decimals)
        assert len(table["softmax"]) == LAYERS + 1


def test_every_run_setting_and_version_is_there(page):
    (box,) = page.find("div", aria_label="Runs")
    rows = [[cell.text for cell in row.children] for row in box.find("tbody")[0].find("tr")]
    results = make_results()
    assert len(rows) == len(MECHANISMS) * len(SEEDS)
    for cells, row in zip(rows, results["rows"], strict=True):
        seconds = f"{row['train_seconds']:.1f}"
        assert cells == [row["mechanism"], str(row["seed"]), "0.001", "done", f"{row['top1']:.2f}", seconds]
    (made,) = page.find("section", id="made")
    pairs = {pair.find("dt")[0].text: pair.find("dd")[0].text for pair in made.find("div")}
    meta = results["meta"]
    assert "".join(made.find("code")[0].words).strip() == meta["command"]
    assert pairs.keys() >= meta["train"].keys() | meta["host"].keys() | {"date", "device", "cpu", "threads", "seeds"}
    assert (pairs["betas"], pairs["ema_decay"], pairs["flip"], pairs["min_lr"]) == (
        "0.9, 0.999",
        "none",
        "yes",
        "1e-05",
    )
    assert pairs["version of torch"] == meta["versions"]["torch"]
    rates = table_of(page, "Learning rates")
    assert rates["nala"]["chosen"] == "0.001"
    assert float(rates["nala"]["0.0005"]) == pytest.approx(sum(MECHANISMS["nala"][0]) / 3 - 0.9, abs=0.005)


def test_opening_says_what_was_compared(page):
    (lead,) = page.find("p", class_="lead")
    for words in (
        "fashion-mnist",
        "60,000 training",
        "28 × 28",
        f"{TOKENS} tokens",
        f"{EPOCHS} epochs",
        "3 seeds (0, 1, 2)",
    ):
        assert words in lead.text
    assert "NVIDIA H200" in lead.text
    assert "10 classes" in lead.text


def test_every_chart_has_words_and_the_sections_come_in_reading_order(page):
    order = [
        "results",
        "accuracy-speed",
        "learning-curves",
        "entropy",
        "cost",
        "attention-maps",
        "layers",
        "runs",
        "made",
    ]
    assert [section.attributes["id"] for section in page.find("section")] == order
    charts = page.find("svg", role="img")
    assert len(charts) == 8
    for chart in charts:
        assert all(name in chart.attributes["aria-label"] for name in MECHANISMS)
    assert all(figure.find("figcaption")[0].text for figure in page.find("figure"))
    assert f"{log(TOKENS):.2f} nats" in page.find("section", id="entropy")[0].find("figcaption")[0].text
    images = page.find("img")
    assert len(images) == 2 * (len(MECHANISMS) + 1)
    assert all(
        image.attributes["alt"] and image.attributes["src"].startswith("data:image/png;base64,") for image in images
    )


def test_svg_text_is_text_and_ids_occur_once(page):
    names = {word for chart in page.find("svg", role="img") for node in chart.find("text") for word in [node.text]}
    assert names >= {*MECHANISMS, "images per second, forward", "epochs trained", "layer"}
    ids = [node.attributes["id"] for node in page.nodes() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    targets = {target for node in page.nodes() for target in re.findall(r"^#(.*)", node.attributes.get("href", ""))}
    targets |= {t for node in page.nodes() for t in re.findall(r"url\(#(.*?)\)", " ".join(node.attributes.values()))}
    assert targets
    assert targets <= set(ids)


def outside(text: str) -> list[str]:
    """What could make a browser fetch something, apart from data inside the page."""
    text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]*", "", text)
    found = re.findall(r"https?:|//|@import|@font-face|url\((?!#)|<link|<iframe|<object|fetch\(|XMLHttp|import\(", text)
    return found + re.findall(r'\b(?:src|href|action)="(?!#|")[^"]*', text)


def test_nothing_is_fetched(text):
    assert not outside(text)
    assert outside('<img src="a.png">')
    assert outside("body { background: url(a.png) }")
    assert outside('<p xmlns="http://a">')


def test_same_results_same_bytes(tmp_path, text):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert write_report(write_folder(tmp_path / name)).read_bytes() == text.encode()
    first, second = (sorted((tmp_path / name / "charts").iterdir()) for name in ("a", "b"))
    assert [path.name for path in first] == [path.name for path in second]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_text_from_outside_is_escaped(page):
    clean = page
    results, examples = make_results(), make_examples()
    evil = "".join(NASTY)
    renamed = json.loads(json.dumps([results, examples]).replace('"nala"', json.dumps(evil)))
    results, examples = renamed
    meta = results["meta"]
    meta.update(command=evil, device=evil, cpu=evil, date=evil, versions={evil: evil})
    meta["data"].update(name=evil, classes=NASTY)
    meta["host"].update(size=evil)
    meta["train"].update(rand_augment=evil)
    results["rows"][0].update(status="failed", reason=evil)
    results["mechanisms"][0]["layers"][0]["layer"] = evil
    examples.update(layer=evil)
    examples["images"][0].update(label=evil)
    page = parse(page_text(results, examples))
    names = {node.name for node in page.nodes()}
    assert len(page.find("script")) == len(page.find("style")) == len(page.find("title")) == 1
    assert all(not key.startswith("on") for node in page.nodes() for key in node.attributes)
    assert all(image.attributes["src"].startswith("data:") for image in page.find("img"))
    # Text that was taken as markup would be missing from the text, and would bring elements of its own.
    shown = " ".join(evil.split())
    assert shown in page.find("ul", class_="failed")[0].text
    assert shown in page.find("h1")[0].text
    assert shown in "".join(page.find("code")[0].words)
    assert any(shown == node.text for node in page.find("text"))
    assert evil in table_of(page, "Results")
    assert names - {node.name for node in clean.nodes()} == {"b"}  # the failed run's own heading
    assert len(page.find("b")) == 1


def test_unfinished_results_are_shown_and_said_to_be_unfinished():
    page = parse(page_text(make_unfinished(), None))
    assert page.find("p", class_="tag")[0].text == "Unfinished"
    (summary,) = page.find("p", class_="summary")
    assert summary.text.startswith("Unfinished: 5 of 21 runs are done. 1 run failed and is left out.")
    assert "relu, seed 2: loss is nan in epoch 3" in page.find("ul", class_="failed")[0].text.replace(" :", ":")
    table = table_of(page, "Results")
    assert list(table) == list(MECHANISMS)
    # Two of three runs are done, and the comparison has not summed them up yet: 91.02 and 91.34.
    assert table["relu"]["top-1"] == "91.18 ± 0.23 91.02–91.34, 2 seeds"
    assert set(list(table["pola"].values())[1:]) == {"–"}
    (box,) = page.find("div", aria_label="Runs")
    states = [row.find("td")[2].text for row in box.find("tbody")[0].find("tr")]
    assert (states.count("done"), states.count("failed"), states.count("waiting")) == (5, 1, 15)


@pytest.mark.parametrize(
    "results",
    [
        {"meta": {}, "mechanisms": [], "rows": []},
        {"meta": {"finished": False}, "mechanisms": [], "rows": [{"mechanism": "relu"}]},
        {"meta": {"data": None}, "mechanisms": [{"mechanism": "relu", "layers": None, "sweep": None}], "rows": []},
    ],
)
def test_results_without_numbers_give_a_page_without_charts(tmp_path, results):
    page = parse(write_report(write_folder(tmp_path, results, {"images": []})).read_text())
    assert "No linear mechanism has a result yet." in page.find("p", class_="summary")[0].text
    assert not page.find("svg", role="img")
    assert not (tmp_path / "charts").exists()
    assert list(table_of(page, "Results")) == ["relu"] * bool(results["mechanisms"] or results["rows"])


def test_one_seed_shows_no_spread():
    results = make_results()
    for entry in results["mechanisms"]:
        entry.update(top1_std=None, top1_min=entry["top1_mean"], top1_max=entry["top1_mean"], runs=1)
    page = parse(page_text(results, None))
    assert table_of(page, "Results")["nala"]["top-1"] == "92.98 1 seed"
    assert "no ranking is claimed" in page.find("p", class_="summary")[0].text
