"""The comparison page: run folders in, one self-contained HTML file out (`quatrain report`).

`collect` reads what a trainer wrote, finished or not; `gaps` does the arithmetic of definitions 22 (paired gaps, 95 %
intervals); `figures`, `tables` and `words` draw and say it; `page` puts the file together.
"""

from quatrain.report.collect import find_runs, read_runs
from quatrain.report.gaps import summarise
from quatrain.report.page import write_report

__all__ = ["find_runs", "read_runs", "summarise", "write_report"]
