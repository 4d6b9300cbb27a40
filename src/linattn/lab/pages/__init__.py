"""Charts and pages made from results."""

from linattn.lab.pages.charts import write_charts
from linattn.lab.pages.csv_files import write_csv
from linattn.lab.pages.summary import edge_sentence, ranking_sentence
from linattn.lab.pages.write import write_report

__all__ = ["edge_sentence", "ranking_sentence", "write_charts", "write_csv", "write_report"]
