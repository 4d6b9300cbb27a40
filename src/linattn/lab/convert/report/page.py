"""The page about a conversion: what it cost, and what it gained."""

from collections.abc import Mapping
from json import loads
from pathlib import Path
from typing import Any

from linattn.lab.convert.report.charts import charts_of
from linattn.lab.convert.report.tables import ablation_table, layer_table, samples_of, stage_table, verdict
from linattn.lab.page.markup import Markup, element, unbroken
from linattn.lab.pages.frame import chart_section, document, made_section, pairs, table_section, write_page
from linattn.support.extras import need
from linattn.support.options import OptionError

RESULTS = "report.json"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` and the PNG files in ``charts/`` from the ``report.json`` of ``folder``."""
    need("the report's charts", "matplotlib")
    path = folder / RESULTS
    if not path.is_file():
        raise OptionError("folder", f"must hold a {RESULTS}, as `linattn linearize` writes it, got {folder}")
    results = loads(path.read_text())
    charts = {f"charts/{chart.name}.png": chart for chart in charts_of(results)}
    return write_page(folder / "report.html", page(results), charts)[-1]


def page(results: Mapping[str, Any]) -> str:
    """The text of the page; the same results give the same text."""
    meta: Mapping[str, Any] = results.get("meta") or {}
    name, method = meta.get("model", "a model"), meta.get("method", "an unknown method")
    title = f"{name}, linearized with {method}"
    ablation = ablation_table(results)
    parts: list[Markup | None] = [
        element("header", element("h1", title), _lead(meta), *_summary(results)),
        table_section("Stage by stage", "stages", stage_table(results), STAGES),
        *(chart_section(chart) for chart in charts_of(results)),
        None if ablation is None else table_section("Is it the linear part?", "ablation", ablation, ABLATION),
        samples_of(results),
        _layers(results),
        made_section(meta, *(pairs(meta[part]) for part in ("settings", "evaluation") if meta.get(part))),
    ]
    return document(title, *parts)


STAGES = (
    "Teacher: the model as it was. Converted: its attention replaced, nothing trained. Transfer: each layer taught the "
    "output of the softmax it replaces. Finetune: all layers together, through low-rank updates. Perplexity: windows "
    "of held-out text, nothing before them. Cache and speed are those of the longest context that was measured."
)
ABLATION = (
    "The same model with parts of its attention switched off. A part counts if what it adds is more than twice its "
    "standard error, window by window and needle by needle."
)


def _lead(meta: Mapping[str, Any]) -> Markup:
    words = [f"{count:,} of its attention layers were converted" if (count := meta.get("converted")) else ""]
    if tokens := meta.get("training_tokens"):
        words.append(f"{tokens:,} tokens were read in training, repeats counted")
    text = ", ".join(filter(None, words))
    return element("p", f"{text[:1].upper()}{text[1:]}.", class_="lead") if text else element("p", class_="lead")


def _summary(results: Mapping[str, Any]) -> list[Markup]:
    text = verdict(results)
    return [element("p", unbroken(text), class_="summary")] if text else []


def _layers(results: Mapping[str, Any]) -> Markup | None:
    table = layer_table(results)
    reading = (
        "Missed: the share of the teacher's output that a layer does not reproduce, on held-out text; 0 is exact, 1 is "
        "as bad as no output."
    )
    return None if table is None else table_section("Layer by layer", "layers", table, reading)
