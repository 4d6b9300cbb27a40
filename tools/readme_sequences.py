"""The generated parts of docs/sequences.md: comparisons on sequences, decoding, training throughput."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from readme_comparison import ARROWS, on_sequences
from readme_parts import chart_line, three_digits

from linattn.lab.bench.decoding import overtakes as decoding_overtakes
from linattn.lab.bench.throughput import overtakes as training_overtakes
from linattn.lab.page.plots import Chart, save_png
from linattn.lab.pages.charts_speed import speed_chart
from linattn.lab.pages.charts_state import state_chart
from linattn.lab.pages.metric import Metric
from linattn.lab.pages.read import Comparison
from linattn.lab.pages.summary import edge_sentence, ranking_sentence

SOFTMAX = "softmax"
CHARTS: dict[str, Callable[[Comparison], Chart | None]] = {"compare-mqar": state_chart, "compare-enwik8": speed_chart}
EDGES = "↑ and ↓: the highest and the lowest learning rate that was tried, so that a better one may lie beyond."
HELD_OUT = (
    "In brackets: of runs that choose a learning rate, the best one so far, by sequences that are neither trained nor "
    "tested on. The run that is tested was not reached."
)


def draw_charts(results: Path) -> list[Path]:
    """The charts of comparisons beside their results; the others' commands have drawn theirs."""
    written = []
    for name, make in CHARTS.items():
        for path in sorted(results.glob(f"*/{name}.json")):
            chart = make(Comparison(json.loads(path.read_text())))
            if chart is not None:
                written.append(path.with_suffix(".png"))
                save_png(chart, written[-1])
    return written


def canon_text(path: Path) -> str:
    """One line a mechanism and width, without and with Canon layers side by side."""
    result = json.loads(path.read_text())
    meta, entries = result["meta"], result["mechanisms"]
    metric = Metric.of(meta)
    canons = list(dict.fromkeys(entry["canon"] for entry in entries))
    hosts = list(dict.fromkeys((entry["pattern"], entry["width"]) for entry in entries))
    widths = len({width for _, width in hosts}) > 1
    names = [f"{metric.title}: {_with(canon)}" for canon in canons]
    head = ["mechanism", *(["width"] if widths else []), *names, "learning rate", "parameters", "state, KiB"]
    lines = []
    for pattern, width in hosts:
        own = [_entry(entries, pattern, canon, width) for canon in canons]
        cells = [f"`{pattern}`", *([str(width)] if widths else []), *(_score(entry, metric) for entry in own)]
        cells += [_joined(own, _rate), _joined(own, _number("parameters")), _joined(own, _number("state_bytes", 2**10))]
        lines.append([*cells, _joined(own, _number("tokens_per_second_train", 1e6)), _joined(own, _seconds)])
    head += ["million tokens/s, training", "seconds a run"]
    tested = [ranking_sentence(result)] if any(row["status"] == "done" for row in result["rows"]) else []
    said = [*tested, sweep_sentence(entries, metric), EDGES if edge_sentence(result) else "", graphs_sentence(result)]
    more = kinds_table(result, hosts, canons)
    chart = chart_line(path, metric.title)
    return "\n".join([*_lead(meta), *_table(head, lines), "", *more, *filter(None, said), *chart, ""])


def kinds_table(result: dict[str, Any], hosts: list[tuple[str, int | None]], canons: list[str | None]) -> list[str]:
    """Where a test has sequences of several kinds, ``accuracy_64x4`` and so on: one column a kind."""
    runs = [(row["mechanism"], row["epochs"][-1]["metrics"]) for row in result["rows"] if row.get("epochs")]
    kinds = list(dict.fromkeys(name for _, found in runs for name in found if name.startswith("accuracy_")))
    if not kinds:
        return []
    titles = [f"{kind.removeprefix('accuracy_').replace('x', ' tokens, ')} pairs" for kind in kinds]
    head, lines = ["mechanism", "width", *titles], []
    for pattern, width in hosts:
        names = [_entry(result["mechanisms"], pattern, canon, width).get("mechanism") for canon in canons]
        found = [[metrics for mechanism, metrics in runs if mechanism == name] for name in names]
        own = [{kind: mean(m[kind] for m in metrics) for kind in kinds} if metrics else {} for metrics in found]
        lines.append([f"`{pattern}`", str(width), *(_joined(own, _number(kind, digits=1)) for kind in kinds)])
    between = " / ".join(map(_with, canons))
    return [f"By length and number of pairs, accuracy in %: {between}.", "", *_table(head, lines), ""]


def sweep_sentence(entries: list[dict[str, Any]], metric: Metric) -> str:
    """How far the choice of learning rates has come, where runs that are tested wait for it."""
    if all(_best_held_out(entry, metric) is None for entry in entries):
        return ""
    scores = [run[metric.field] for entry in entries for run in entry["sweep"] or []]
    return f"{HELD_OUT} {sum(score is not None for score in scores)} of {len(scores)} runs that choose are done."


def graphs_sentence(result: dict[str, Any]) -> str:
    """Which runs were not replayed although that was asked for, and why."""
    found = {row["mechanism"]: row["graphs"] for row in result["rows"] if row.get("graphs", "").startswith("stopped")}
    words = "; ".join(f"{name} ({reason.removeprefix('stopped: ')})" for name, reason in found.items())
    return f"Trained kernel by kernel, not as CUDA graphs: {words}." if words else ""


def decoding_text(path: Path) -> str:
    """Contexts down, mechanisms across, for every batch: time of a token and memory; of the fastest mode measured."""
    result = json.loads(path.read_text())
    meta, rows, model = result["meta"], result["rows"], result["meta"]["model"]
    lines = [
        f"**Decoding**: {model['depth']} layers of {model['width']}, {model['vocabulary']:,} tokens of vocabulary, "
        f"{meta['settings']['dtype']}; milliseconds a token, and in brackets the MiB of keys and values or of states.",
        _where(meta),
        "",
    ]
    modes = list(dict.fromkeys(row["mode"] for row in rows if row["status"] != "absent"))
    mode = modes[-1] if modes else ""
    for batch in dict.fromkeys(row["batch"] for row in rows):
        own = [row for row in rows if (row["batch"], row["mode"]) == (batch, mode)]
        head, table = _across(own, "context", _decoding_cell)
        lines += [f"Batch {batch}, {mode}:", "", *_table(head, table, numbers_from=0), ""]
    lines += [_overtakes(decoding_overtakes(rows), mode), _checked(rows)]
    return "\n".join([*lines, *chart_line(path, "time and memory of a decoded token against the context"), ""])


def throughput_text(path: Path) -> str:
    """Lengths down, mechanisms across."""
    result = json.loads(path.read_text())
    meta, rows, model = result["meta"], result["rows"], result["meta"]["model"]
    head, table = _across(rows, "length", _throughput_cell)
    lines = [
        f"**Training**: {model['depth']} layers of {model['width']}, {meta['settings']['tokens']:,} tokens a step, "
        f"{meta['settings']['dtype']}, compiled; thousand tokens a second, and how many times softmax's.",
        _where(meta),
        "",
        *_table(head, table, numbers_from=0),
        "",
        _overtakes(training_overtakes(rows), "training"),
        _checked(rows),
    ]
    return "\n".join([*lines, *chart_line(path, "training tokens a second against the length"), ""])


def _lead(meta: dict[str, Any]) -> list[str]:
    remark = [meta["remark"]] if "remark" in meta else []
    return [on_sequences(meta), _where(meta), *remark, ""]


def _where(meta: dict[str, Any]) -> str:
    return f"{meta['device']}, torch {meta['versions']['torch']}, {meta['date'][:10]}: `{meta['command']}`."


def _table(head: list[str], lines: list[list[str]], numbers_from: int = 1) -> list[str]:
    rule = "|" + "".join("---|" if i < numbers_from else "---:|" for i in range(len(head)))
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]


def _with(canon: str | None) -> str:
    return "no Canon" if canon is None else f"Canon {canon}"


def _entry(entries: list[dict[str, Any]], pattern: str, canon: str | None, width: int | None) -> dict[str, Any]:
    return next((e for e in entries if (e["pattern"], e["canon"], e["width"]) == (pattern, canon, width)), {})


def _score(entry: dict[str, Any], metric: Metric) -> str:
    middle, std = entry.get(f"{metric.field}_mean"), entry.get(f"{metric.field}_std")
    if middle is None:
        best = _best_held_out(entry, metric)
        return "" if best is None else f"({metric.number(best[metric.field])})"
    return metric.number(middle) + ("" if std is None else f" ± {metric.number(std)}")


def _best_held_out(entry: dict[str, Any], metric: Metric) -> dict[str, Any] | None:
    """Of the runs that choose a learning rate, where none that is tested is done."""
    tried = [run for run in entry.get("sweep") or [] if run[metric.field] is not None]
    if entry.get(f"{metric.field}_mean") is not None or not tried:
        return None
    return (max if metric.higher else min)(tried, key=lambda run: run[metric.field])


def _rate(entry: dict[str, Any]) -> str:
    return "" if entry.get("lr") is None else f"{entry['lr']:g}{ARROWS[entry.get('lr_edge')]}"


def _seconds(entry: dict[str, Any]) -> str:
    return "" if entry.get("train_seconds_mean") is None else f"{entry['train_seconds_mean']:.0f}"


def _number(field: str, unit: float = 1, digits: int = 0) -> Callable[[dict[str, Any]], str]:
    """A cell of a field; in another unit it has three digits."""

    def cell(entry: dict[str, Any]) -> str:
        value = entry.get(field)
        if value is None:
            return ""
        return f"{value:,.{digits}f}" if unit == 1 else three_digits(value / unit)

    return cell


def _joined(entries: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    """Side by side; once where all are the same."""
    found = [cell(entry) for entry in entries]
    return found[0] if len(set(found)) == 1 else " / ".join(found)


def _across(
    rows: list[dict[str, Any]], down: str, cell: Callable[[dict[str, Any], dict[str, Any] | None], str]
) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with mechanisms across; each cell sees softmax's row too."""
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    found = {(row[down], row["mechanism"]): row for row in rows}
    lines = [
        [f"{size:,}", *(cell(found[size, n], found.get((size, SOFTMAX))) if (size, n) in found else "" for n in names)]
        for size in sorted({row[down] for row in rows})
    ]
    return [down, *(f"`{name}`" for name in names)], lines


def _decoding_cell(row: dict[str, Any], _: dict[str, Any] | None) -> str:
    if row.get("median_ms") is None:
        return str(row["status"])
    return f"{three_digits(row['median_ms'])} ({three_digits(row['state_bytes'] / 2**20)})"


def _throughput_cell(row: dict[str, Any], softmax: dict[str, Any] | None) -> str:
    if row.get("tokens_per_second") is None:
        return str(row["status"])
    speed = three_digits(row["tokens_per_second"] / 1000)
    if row["mechanism"] == SOFTMAX or softmax is None or softmax.get("tokens_per_second") is None:
        return speed
    return f"{speed} ({row['tokens_per_second'] / softmax['tokens_per_second']:.2f}x)"


def _overtakes(crossovers: Iterable[dict[str, Any]], setting: str) -> str:
    words = []
    for found in crossovers:
        if setting not in found["setting"]:
            continue
        at = "nowhere" if found["length"] is None else f"from {found['length']:,.0f} tokens on"
        batch = found["setting"].split(",")[0] + ", " if "batch" in found["setting"] else ""
        words.append(f"`{found['mechanism']}` {batch}{at} ({found['gain']:.3g}x at {found['longest']:,})")
    return f"Faster than softmax: {'; '.join(words)}." if words else ""


def _checked(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row.get("budget")]
    worst = max((row["error"] / row["budget"] for row in checked if row["status"] != "WRONG"), default=0)
    bad = [
        f"{row['mechanism']} ({row['status']}: {row.get('reason', '')})"
        for row in rows
        if row["status"] in ("WRONG", "failed")
    ]
    left = sum(row["status"] == "left out" for row in rows)
    said = f" Wrong or failed: {'; '.join(bad)}." if bad else ""
    said += f" {left} rows are not measured yet." if left else ""
    return f"{len(checked)} rows were checked in the same run and used at most {worst:.0%} of their error budget.{said}"
