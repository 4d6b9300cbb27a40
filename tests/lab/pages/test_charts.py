"""What is drawn: numbers, places of labels, colours, pixels."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lab.pages.fixtures import EPOCHS, MECHANISMS, make_results, make_unfinished, write_folder
from linattn.lab.page import plots as panels
from linattn.lab.page.numbers import common_unit
from linattn.lab.page.plots import key, plot_line
from linattn.lab.page.style import styles
from linattn.lab.pages import write_charts
from linattn.lab.pages.charts import charts_of
from linattn.lab.pages.charts_learning import seed_curve
from linattn.lab.pages.labels import Box, place_labels
from linattn.lab.pages.overlay import heat_picture, picture
from linattn.lab.pages.read import Comparison, load_results
from linattn.support.options import OptionError


def axes_of(name: str, index: int, results=None):
    (chart,) = [chart for chart in charts_of(Comparison(results or make_results())) if chart.name == name]
    axes = Figure(dpi=72).add_axes((0.1, 0.1, 0.8, 0.8))
    chart.panels[index].draw(axes)
    return axes


def test_png_files_are_written(tmp_path):
    paths = write_charts(write_folder(tmp_path), make_results())
    names = ["accuracy-speed.png", "learning-curves.png", "entropy.png", "cost.png", "attention-maps.png"]
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == sorted(names)
    for path in paths:
        pixels = imread(path)
        assert min(pixels.shape[:2]) > 300
        assert pixels[..., :3].std() > 0.05


@pytest.mark.parametrize(("index", "field"), [(0, "images_per_second_forward"), (1, "images_per_second_train")])
def test_points_and_bars_are_mean_and_range(index, field):
    axes = axes_of("accuracy-speed", index)
    look = styles(list(MECHANISMS))
    for entry, bars in zip(make_results()["mechanisms"], axes.containers, strict=True):
        assert bars.lines[0].get_xydata().tolist() == [[entry[field], entry["top1_mean"]]]
        assert bars.lines[0].get_color() == look[entry["mechanism"]].color
        ((low, high),) = bars.lines[2][0].get_segments()
        assert (low[1], high[1]) == pytest.approx((entry["top1_min"], entry["top1_max"]))
    assert sorted(text.get_text() for text in axes.texts) == sorted(MECHANISMS)


def test_learning_curves_are_mean_and_range_over_seeds():
    results = make_results()
    curve = seed_curve(Comparison(results), "pola", "top1")
    runs = [[e["top1"] for e in row["epochs"]] for row in results["rows"] if row["mechanism"] == "pola"]
    assert [epoch for epoch, *_ in curve] == list(range(1, EPOCHS + 1))
    expected = np.array([np.mean(runs, 0), np.min(runs, 0), np.max(runs, 0)]).T
    np.testing.assert_allclose([point[1:] for point in curve], expected, rtol=1e-12)
    lines = axes_of("learning-curves", 0).lines
    np.testing.assert_allclose(lines[list(MECHANISMS).index("pola")].get_ydata(), expected[:, 0])


def test_failed_runs_are_not_part_of_a_curve():
    results = make_unfinished()
    curve = seed_curve(Comparison(results), "relu", "train_loss")
    runs = [[e["train_loss"] for e in row["epochs"]] for row in results["rows"][3:5]]
    np.testing.assert_allclose([mean for _, mean, *_ in curve], np.mean(runs, 0))
    assert not seed_curve(Comparison(results), "pola", "train_loss")


def test_softmax_is_emphasised_and_colours_are_the_same_everywhere():
    look = styles(list(MECHANISMS))
    lines = axes_of("entropy", 0).lines[: len(MECHANISMS)]
    assert [line.get_color() for line in lines] == [style.color for style in look.values()]
    widths = dict(zip(MECHANISMS, [line.get_linewidth() for line in lines], strict=True))
    assert all(widths["softmax"] > width for name, width in widths.items() if name != "softmax")
    assert len({(style.color, style.marker) for style in styles([str(i) for i in range(66)]).values()}) == 66


def test_a_mechanism_with_canon_layers_is_drawn_as_the_plain_one_but_hollow():
    look = styles(["softmax", "softmax+ABCD", "gated 64", "gated+ABCD 64", "zeros+AbCD"])
    for plain, with_canon in (("softmax", "softmax+ABCD"), ("gated 64", "gated+ABCD 64")):
        assert look[plain] != look[with_canon] == replace(look[plain], hollow=True)
    assert not look["zeros+AbCD"].hollow, "there is none without"
    axes = Figure().subplots()
    for style in (look["gated 64"], look["gated+ABCD 64"]):
        plot_line(axes, [1.0, 2.0], [1.0, 2.0], style)
    filled, hollow = axes.lines
    assert filled.get_color() == hollow.get_color() == filled.get_markerfacecolor() != hollow.get_markerfacecolor()
    assert (filled.get_linestyle(), hollow.get_linestyle()) == ("-", "--")
    mark = str(key("gated+ABCD", look["gated+ABCD 64"], "M0 0"))
    assert f"fill:none;stroke:var({look['gated 64'].variable})" in mark


def test_labels_of_a_crowd_cover_neither_one_another_nor_the_points():
    points = [(100 + 9 * (i % 3), 100 + 9 * (i // 3)) for i in range(7)]
    frame = Box(0, 0, 260, 200)
    boxes = place_labels(list(MECHANISMS), points, [], frame)
    assert all(a.shared(b) == 0 for a, b in combinations(boxes, 2))
    assert all(box.shared(frame) == pytest.approx(box.area) for box in boxes)
    marks = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    assert sum(box.shared(mark) for box in boxes for mark in marks) == 0


def test_labels_of_ticks_stay_inside_of_the_picture():
    measured = Path(__file__).parents[3] / "results" / "h200" / "compare-mqar.json"
    results = [make_results(), json.loads(measured.read_text())]
    charts = [chart for result in results for chart in charts_of(Comparison(result)) if chart.name != "attention-maps"]
    assert "accuracy-state" in {chart.name for chart in charts}
    for chart in charts:
        for panel in chart.panels:
            with panels.settings("salt"):
                figure = panels.figure_of(panels.WIDTH, panel.height, "none")
                axes = panels._axes(figure, panel, 0.0, 0.0)
                panel.draw(axes)
                figure.canvas.draw()
            whole = figure.bbox
            for axis in (axes.xaxis, axes.yaxis):
                low, high = axis.get_view_interval()
                for tick in axis.get_major_ticks():
                    box = tick.label1.get_window_extent()
                    if low <= tick.get_loc() <= high and tick.label1.get_text():
                        inside = box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0 and box.y1 <= whole.y1
                        assert inside, (chart.name, tick.label1.get_text())


def test_heat_is_laid_over_the_image_token_by_token():
    image = [[0] * 28 for _ in range(28)]
    heat = [[0.0] * 14 for _ in range(14)]
    heat[3][10] = 2.0
    heat[4][10] = -5.0  # below zero is no attention
    pixels = heat_picture(image, heat, None)
    assert pixels.shape == (112, 112, 3)
    bright = pixels.sum(-1) > 300
    rows, columns = np.nonzero(bright)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (24, 31, 80, 87)
    assert bright.sum() == 64
    np.testing.assert_array_equal(pixels, heat_picture(image, [[5 * w for w in row] for row in heat], None))


def test_the_chosen_token_is_framed_and_the_image_kept():
    image = [[[10 * x, 10 * y, 50] for x in range(8)] for y in range(6)]
    plain, marked = picture(image, None, None), picture(image, [1, 2], (3, 4))
    assert plain.shape == (84, 112, 3)
    np.testing.assert_array_equal(plain[7::14, 7::14], np.array(image))
    rows, columns = np.nonzero((plain != marked).any(-1))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (28, 55, 56, 83)


def test_units_give_every_value_enough_digits():
    unit = common_unit([1_234, None, 99_500, 0])
    assert (unit.text(1_234), unit.text(99_500), unit.text(0), unit.text(None)) == ("1.23", "99.50", "0.00", "–")
    assert common_unit([]).text(None) == "–"
    assert common_unit([512, 640]).text(512) == "512"


@pytest.mark.parametrize(
    ("content", "words"), [(None, "there is none"), ("{", "not JSON"), ("[]", "meta, mechanisms and")]
)
def test_a_folder_without_results_is_named(tmp_path, content, words):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(OptionError, match=words) as error:
        load_results(tmp_path)
    assert error.value.option == "folder"
