"""Charts and pages made from results."""

from linattn.report.charts import write_charts
from linattn.report.csv_files import write_csv
from linattn.report.summary import edge_sentence, ranking_sentence
from linattn.report.write import write_report

__all__ = ["edge_sentence", "ranking_sentence", "write_charts", "write_csv", "write_report"]
