"""Should this training job go heterogeneous, and with what?

prediction.py has the formula, sources.py says where a job's numbers come from, verdict.py has the
flowchart, report.py what is shown of the answer, and command.py `python -m shared.advisor`.
"""

from shared.advisor.command import main
from shared.advisor.prediction import Measured
from shared.advisor.report import Advice, plot
from shared.advisor.sources import measure
from shared.advisor.verdict import advise

__all__ = ["Advice", "Measured", "advise", "main", "measure", "plot"]
