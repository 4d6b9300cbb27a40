"""The page says what the rows say, claims no more than the seeds show, and needs nothing from outside."""

import json
import re
from itertools import pairwise
from math import log
from statistics import fmean

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from tests.lab.compare.results_of import (
    EPOCHS,
    LAYERS,
    MECHANISMS,
    SEEDS,
    TOKENS,
    make_examples,
    make_meta,
    make_rows,
    score,
)
from tests.lab.page.html_page import parse, table_of

from linattn.lab.compare.figures import charts_of, maps, seed_curve
from linattn.lab.compare.findings import Findings
from linattn.lab.compare.page import STATISTICS, comparison_page
from linattn.lab.page import plots, write_page

# Each of these would open a box, close an attribute or end a script if it came through as it is.
EVIL = "<script>alert(1)</script>\"><img src=x onerror='alert(1)'></script></style></title><b>&amp;$\\frac{1}{2}$ & ' `"


def write(folder, meta, rows, examples):
    return write_page(folder / "report.html", *comparison_page(Findings(meta, rows), examples))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("page"), make_meta(), make_rows(), make_examples()).parent


@pytest.fixture(scope="module")
def text(folder):
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text):
    return parse(text)


def written(tmp_path, meta, rows, examples=None):
    return parse(write(tmp_path, meta, rows, examples or {}).read_text())


def number(cell):
    return float(re.match(r"[−+-]?[\d,.]+", cell)[0].replace("−", "-").replace(",", ""))


def test_the_table_has_the_numbers_of_the_rows(page):
    table = table_of(page, "Results")
    assert list(table) == list(MECHANISMS)
    for name, row in table.items():
        scores = [score(name, seed) for seed in SEEDS]
        assert row["top-1"].startswith(f"{fmean(scores):.2f} ± {np.std(scores, ddof=1):.2f}")
        assert f"{min(scores):.2f} to {max(scores):.2f}, 5 seeds" in row["top-1"]
        assert number(row["forward"]) == pytest.approx(MECHANISMS[name][1] / 1e3, rel=0.01)
        assert number(row["peak memory"]) == pytest.approx(MECHANISMS[name][2], abs=0.05)
        if name == "softmax":
            assert (row["state"], row["entropy gap"], row["to softmax"]) == ("–", "–", "–")
            assert "reference" in row["mechanism"]
        else:
            assert number(row["entropy gap"]) == pytest.approx(MECHANISMS[name][3] - MECHANISMS["softmax"][3], abs=0.01)
            paired = fmean(score(name, seed) - score("softmax", seed) for seed in SEEDS)
            assert number(row["to softmax"]) == pytest.approx(paired, abs=0.006)
    (box,) = page.find("div", aria_label="Results")
    values = [row.find("td")[0].attributes["data-value"] for row in box.find("tbody")[0].find("tr")]
    assert list(map(float, values)) == [fmean(score(name, seed) for seed in SEEDS) for name in MECHANISMS]


def test_differences_are_claimed_by_pairs_of_seeds_and_never_of_few(page, tmp_path):
    """The scores of seeds overlap by far; their differences do not."""
    table = table_of(page, "Results")
    assert table["relu"]["to softmax"].endswith("worse")
    assert table["nala"]["to softmax"].endswith("no difference shown")
    (said,) = page.find("p", class_="summary")
    assert "relu is worse than softmax" in said.text
    assert "No difference to softmax is shown for nala" in said.text
    few = written(tmp_path, make_meta(), make_rows(range(2)))
    (said,) = few.find("p", class_="summary")
    assert "Nothing is claimed of fewer than 5 seeds" in said.text
    assert "the same command with --seeds 5" in said.text
    assert not re.search(r"better than|worse than", said.text)
    assert all(row["to softmax"].endswith(("too few seeds", "–")) for row in table_of(few, "Results").values())
    equal = Findings(make_meta(config={"margin": 2.0}), make_rows()).sentences
    assert any("Equal to softmax within 2" in words and "nala" in words for words in equal)


def test_a_busy_machine_failures_and_rates_at_an_edge_are_said(tmp_path):
    rows = make_rows()
    for row in rows:
        if row["kind"] == "cost":
            row["busy"] = 0.4 if row["mechanism"] == "elu" else 0.14
        if row["mechanism"] == "pola" and row["kind"] == "run":
            row["lr"] = 0.002
    failed = next(row for row in rows if row["kind"] == "run" and row["mechanism"] == "relu")
    failed.update(error="the loss is nan", score=None, records=None)
    assert not any("Other work" in words for words in Findings(make_meta(), rows).sentences)
    rows[-1] |= {"kind": "cost", "busy": 0.4}
    page = written(tmp_path, make_meta(), rows)
    (said,) = page.find("p", class_="summary")
    for words in ("1 of 35 runs failed", "beyond: pola (highest, 0.002).", "Other work took 40 %"):
        assert words in said.text
    assert "relu, seed 0 the loss is nan" in page.find("section", id="failed-runs")[0].text
    assert table_of(page, "Results")["relu"]["top-1"].endswith("4 seeds")


def test_statistics_are_means_over_the_heads_that_have_one(page):
    table = table_of(page, "Attention by layer")
    for field, title in STATISTICS.items():
        for row in make_rows():
            for place, layer in enumerate(row.get("layers") or (), 1):
                heads = [value for value in layer[field] if value is not None]
                shown = table[f"{title}, {row['mechanism']}"][f"layer {place}"]
                assert shown == "–" if not heads else number(shown) == pytest.approx(fmean(heads), rel=1e-3)
    assert len(table) == len(STATISTICS) * len(MECHANISMS)
    assert len(table["Entropy, softmax"]) == LAYERS + 1


def test_every_run_rate_setting_and_version_is_there(page):
    (box,) = page.find("div", aria_label="Every run")
    cells = [[cell.text for cell in row.children] for row in box.find("tbody")[0].find("tr")]
    runs = [row for row in make_rows() if row["kind"] == "run"]
    assert cells == [
        [r["mechanism"], f"{r['seed']}", "0.001", f"{r['score']:.2f}", f"{r['seconds']:.1f}"] for r in runs
    ]
    (box,) = page.find("div", aria_label="What was tried")
    assert len(box.find("tbody")[0].find("tr")) == 3 * len(MECHANISMS)
    for words in (make_meta()["command"], "image size 28, 28", "tokens 196", "version of torch 2.11.0", "flip yes"):
        assert words in " ".join(page.text.split())


def test_every_chart_has_words_and_the_sections_come_in_reading_order(page, folder):
    order = ["results", "accuracy-speed", "learning-curves", "entropy", "attention-maps", "made"]
    assert [section.attributes["id"] for section in page.find("section")] == order
    charts = page.find("svg", role="img")
    assert len(charts) == 8
    assert all(name in chart.attributes["aria-label"] for chart in charts for name in MECHANISMS)
    assert f"{log(TOKENS):.2f} nats" in page.find("section", id="entropy")[0].find("figcaption")[0].text
    for name in ("accuracy-speed", "learning-curves", "entropy", "attention-maps"):
        pixels = imread(folder / f"{name}.png")
        assert min(pixels.shape[:2]) > 250
        assert pixels[..., :3].std() > 0.05


def test_svg_text_is_text_and_ids_occur_once(page):
    names = {node.text for chart in page.find("svg", role="img") for node in chart.find("text")}
    assert names >= {"images per second, forward", "epochs trained", "layer"}
    ids = [node.attributes["id"] for node in page.nodes() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    targets = {target for node in page.nodes() for target in re.findall(r"^#(.*)", node.attributes.get("href", ""))}
    targets |= {t for node in page.nodes() for t in re.findall(r"url\(#(.*?)\)", " ".join(node.attributes.values()))}
    assert targets
    assert targets <= set(ids)


def outside(text):
    """What could make a browser fetch something, apart from data inside the page."""
    text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=\s]*", "", text)
    found = re.findall(r"https?:|//|@import|@font-face|url\((?!#)|<link|<iframe|<object|fetch\(|XMLHttp|import\(", text)
    return found + re.findall(r'\b(?:src|href|action)="(?!#|")[^"]*', text)


def test_nothing_is_fetched(text):
    assert not outside(text)
    assert all(map(outside, ('<img src="a.png">', "body { background: url(a.png) }", '<p xmlns="http://a">')))


def test_same_results_same_bytes(tmp_path, folder):
    write(tmp_path, make_meta(), make_rows(), make_examples())
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted(path.name for path in folder.iterdir())
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in files)


def test_text_from_outside_is_escaped(page, tmp_path):
    parts = [make_meta(), make_rows(), make_examples()]
    meta, rows, examples = json.loads(json.dumps(parts).replace('"nala"', json.dumps(EVIL)))
    meta.update(command=EVIL, device=EVIL, cpu=EVIL, about=EVIL, versions={EVIL: EVIL}, config={EVIL: EVIL})
    meta["data"].update(name=EVIL)
    meta["host"].update(size=EVIL)
    examples.update(layer=EVIL)
    examples["images"][0].update(label=EVIL)
    rows[30].update(error=EVIL)
    rows[31].update(options={"alpha": EVIL})
    found = written(tmp_path, meta, rows, examples)
    assert {node.name for node in found.nodes()} == {node.name for node in page.nodes()}
    assert len(found.find("script")) == len(found.find("style")) == len(found.find("title")) == 1
    assert all(not key.startswith("on") for node in found.nodes() for key in node.attributes)
    shown = " ".join(EVIL.split())
    assert shown in found.find("section", id="failed-runs")[0].text
    assert shown in found.find("h1")[0].text
    assert EVIL in table_of(found, "Results")


@pytest.mark.parametrize(
    "rows",
    [[], [{"kind": "run", "mechanism": "relu", "seed": 0, "error": "x"}], [{"kind": "cost", "mechanism": "elu"}]],
)
def test_results_without_numbers_give_a_page_without_charts(tmp_path, rows):
    page = written(tmp_path, {}, rows)
    assert not page.find("svg", role="img")
    assert list(table_of(page, "Results")) == [row["mechanism"] for row in rows]


def drawn(panel):
    with plots.settings("salt"):
        figure = plots.figure_of(plots.WIDTH, panel.height, "none")
        axes = plots.axes_of(figure, panel)
        panel.draw(axes)
        figure.canvas.draw()
    return axes


def panels_of(name, rows, **meta):
    (chart,) = [chart for chart in charts_of(Findings(make_meta(**meta), rows)) if chart.name == name]
    return chart.panels


def test_points_and_bars_are_means_and_ranges_of_both():
    lines = drawn(panels_of("accuracy-speed", make_rows())[0]).lines
    for number, name in enumerate(MECHANISMS):
        scores, speed = [score(name, seed) for seed in SEEDS], MECHANISMS[name][1]
        point, upright, across = (line.get_xydata().tolist() for line in lines[3 * number : 3 * number + 3])
        assert point == [[speed, pytest.approx(fmean(scores))]]
        assert upright == [[speed, min(scores)], [speed, max(scores)]]
        assert np.allclose(across, [[0.9 * speed, fmean(scores)], [1.1 * speed, fmean(scores)]])


def test_learning_curves_are_mean_and_range_over_finished_seeds():
    rows = make_rows()
    next(row for row in rows if row["kind"] == "run" and row["mechanism"] == "pola")["records"] = None
    curve = seed_curve(Findings(make_meta(), rows), "pola", "score")
    runs = [[e["score"] for e in r["records"]] for r in rows if r.get("records") and r["mechanism"] == "pola"]
    assert [x for x, *_ in curve] == list(range(1, EPOCHS + 1))
    expected = np.array([np.mean(runs, 0), np.min(runs, 0), np.max(runs, 0)]).T
    np.testing.assert_allclose([point[1:] for point in curve], expected, rtol=1e-12)
    axes = drawn(panels_of("learning-curves", rows)[0])
    np.testing.assert_allclose(axes.lines[list(MECHANISMS).index("pola")].get_ydata(), expected[:, 0])


def sequence_rows():
    """Three widths of two mechanisms, with fewer bits where the state is larger."""
    rows = []
    for name in ("softmax", "gated"):
        for width in (64, 16, 32):
            named = {"mechanism": f"{name} {width}", "pattern": name, "series": name, "width": width}
            rows += [{"kind": "run", "seed": s, "score": 3 - width / 64 + s / 10, **named} for s in range(5)]
            rows.append({"kind": "cost", **named, "state_bytes": width * 1024, "tokens_per_second_train": [1e6]})
    return rows


def test_sequences_are_compared_width_by_width_and_drawn_against_their_state():
    meta = {"metric": {"name": "bits", "unit": "", "higher": False, "counted": "token", "round": "step"}}
    found = Findings(make_meta(**meta), sequence_rows())
    assert set(found.verdicts) == {"16", "32", "64"}
    assert all(verdicts.reference == f"softmax {width}" for width, verdicts in found.verdicts.items())
    (line, *_) = drawn(panels_of("accuracy-state", sequence_rows(), **meta)[0]).lines
    assert line.get_xydata().tolist() == [[1024 * w, pytest.approx(3.2 - w / 64)] for w in (16, 32, 64)]
    assert {"state", "training"} <= {column.title for column in found.columns()}


def test_labels_of_ticks_stay_inside_of_the_picture():
    for panel in (
        panel
        for rows in (make_rows(), sequence_rows())
        for chart in charts_of(Findings(make_meta(), rows))
        for panel in chart.panels
    ):
        axes = drawn(panel)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            ticks = [
                tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_text()
            ]
            assert len(ticks) > 1
            for box in (tick.label1.get_window_extent() for tick in ticks):
                outer = axes.figure.bbox
                inside = (outer.x0, box.x0, box.x1, outer.x1), (outer.y0, box.y0, box.y1, outer.y1)
                assert all(a <= b for edges in inside for a, b in pairwise(edges)), panel.alt


def test_maps_stand_beside_the_image_and_the_token_is_framed():
    (image, _) = make_examples()["images"]
    image["maps"] = {"relu": [[0.0] * 14 for _ in range(14)], "elu": None}
    image["maps"]["relu"][3][10], image["maps"]["relu"][4][10] = 2.0, -5.0
    axes = Figure(figsize=(4, 3)).add_axes((0, 0, 1, 1))
    (panel,) = maps(["relu", "elu"], {"layer": "last", "images": [image]}).panels
    panel.draw(axes)
    plain, small = axes.child_axes
    assert small.get_title() == "relu"
    np.testing.assert_array_equal(plain.images[0].get_array(), image["pixels"])
    np.testing.assert_array_equal(small.images[0].get_array(), image["maps"]["relu"])
    assert small.images[0].get_clim() == (0, 2), "below zero is no attention"
    for one in (plain, small):
        (frame,) = one.patches
        assert (frame.get_y(), frame.get_x(), frame.get_fill()) == (6, 5, False)
        assert list(one.images[0].get_extent()) == [0, 14, 14, 0]
