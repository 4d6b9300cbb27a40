"""Writes charts and a page from a folder with results."""

from pathlib import Path

from linattn.lab.pages.charts import write_charts
from linattn.lab.pages.frame import write_page
from linattn.lab.pages.page import page
from linattn.lab.pages.read import load_examples, load_results
from linattn.support.extras import need


def write_report(folder: Path) -> Path:
    """Write ``report.html`` and the PNG files of ``charts/`` from the ``results.json`` of ``folder``.

    Attention maps are shown if ``examples.json`` is there. The same results give the same bytes.
    """
    need("the report's charts", "matplotlib")
    results, examples = load_results(folder), load_examples(folder)
    write_charts(folder, results)
    return write_page(folder / "report.html", page(results, examples), {})[-1]
