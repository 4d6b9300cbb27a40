"""Report of a conversion on one page: tables, charts, samples side by side."""

from linattn.lab.convert.report.page import RESULTS, write_report

__all__ = ["RESULTS", "write_report"]
