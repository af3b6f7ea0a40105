"""Should this training job go heterogeneous, and with which instances?

prediction.py has the formula, sources.py reads a job's numbers, verdict.py has the flowchart,
report.py shows the answer, and command.py is `python -m shared.advisor`.
"""

from shared.advisor.command import main
from shared.advisor.prediction import Measured
from shared.advisor.report import Advice, plot
from shared.advisor.sources import read_job
from shared.advisor.verdict import advise

__all__ = ["Advice", "Measured", "advise", "main", "plot", "read_job"]
