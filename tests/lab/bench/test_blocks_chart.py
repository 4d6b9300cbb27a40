"""What a chart of memory against tokens shows."""

from linattn.lab.bench.blocks.chart import annotated, blocks_figure, draw_blocks_chart
from linattn.lab.bench.blocks.rows import BlockRow, BlocksResult, Reduction
from linattn.lab.bench.blocks.settings import BlocksConfig


def made_up() -> BlocksResult:
    """Peaks in MiB: what did not fit has none."""
    peaks = {"softmax": [4, 8, 16], "softmax (map)": [10, 100, None], "nala": [5, 10, 20], "mirror": [5, 9, 12]}
    result = BlocksResult(BlocksConfig().describe(["test"]))
    for name, values in peaks.items():
        for tokens, peak in zip((196, 784, 3136), values, strict=True):
            status = "ok" if peak else "out of memory"
            row = BlockRow(name, tokens, status, peak_bytes=peak and peak * 2**20, seconds=peak and 0.1)
            result.rows.append(row)
    return result


def test_reductions_are_taken_where_both_fit():
    found = {(r.contender, r.against): r for r in made_up().reductions()}
    assert found["nala", "softmax (map)"] == Reduction("nala", "softmax (map)", 784, 90.0)
    assert found["nala", "softmax"] == Reduction("nala", "softmax", 3136, -25.0)
    assert found["mirror", "softmax"] == Reduction("mirror", "softmax", 3136, 25.0)
    assert str(found["nala", "softmax"]) == "25.0 % more than softmax at 3,136 tokens"
    assert made_up().as_json()["reductions"][0] == {
        "contender": "nala", "against": "softmax (map)", "tokens": 784, "percent": 90.0
    }  # fmt: skip
    assert made_up().reduction("nala", "nobody") is None


def test_chart_shows_lines_crosses_and_reductions(tmp_path):
    (panel,) = blocks_figure(made_up()).axes
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line for line in panel.lines}
    assert list(lines["nala"].get_xdata()) == [196, 784, 3136]
    assert list(lines["nala"].get_ydata()) == [5, 10, 20]
    assert list(lines["softmax (map)"].get_ydata()) == [10, 100]
    (crosses,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert list(crosses.get_xdata()) == [3136]
    assert crosses.get_color() == lines["softmax (map)"].get_color()
    texts = [text.get_text() for text in panel.texts]
    assert "softmax (map): out of memory" in texts
    assert "nala:\n90.0 % less than softmax (map) at 784 tokens\n25.0 % more than softmax at 3,136 tokens" in texts
    draw_blocks_chart(made_up(), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_without_nala_the_first_mechanism_is_annotated():
    result = made_up()
    assert annotated(result) == "nala"
    result.rows = [row for row in result.rows if row.contender != "nala"]
    assert annotated(result) == "mirror"
    result.rows = [row for row in result.rows if row.contender.startswith("softmax")]
    assert annotated(result) is None
    assert blocks_figure(result).axes[0].lines
