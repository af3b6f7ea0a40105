"""Monitor a training job: its status, its log, how busy its hosts are, its step time, figures.

describe.py asks SageMaker, log.py reads the hosts' logs, joblog.py decides how long a job's steps
take, bottleneck.py computes how busy the hosts are and finds the bottleneck, figures.py draws the
result, and command.py has the command `python -m shared.monitoring`.
"""

from shared.monitoring.bottleneck import utilisation
from shared.monitoring.command import main
from shared.monitoring.describe import wait
from shared.monitoring.figures import (
    DATA,
    HETEROGENEOUS,
    HOMOGENEOUS,
    TRAINING,
    plot_job,
    plot_steps,
)
from shared.monitoring.log import METRIC_DEFINITIONS, LogLine, logged, logs, show_logs, steps

__all__ = [
    "DATA",
    "HETEROGENEOUS",
    "HOMOGENEOUS",
    "METRIC_DEFINITIONS",
    "TRAINING",
    "LogLine",
    "logged",
    "logs",
    "main",
    "plot_job",
    "plot_steps",
    "show_logs",
    "steps",
    "utilisation",
    "wait",
]
