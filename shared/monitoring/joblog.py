"""What the log of a training job tells, read once: its lines, its steps, how long a step takes."""

from dataclasses import dataclass
from math import nan

import pandas as pd

from shared.measured import data_percent
from shared.measured_line import measured_numbers
from shared.monitoring.log import LogLine, logs, step_table, steps


@dataclass(frozen=True)
class JobLog:
    """What a job's log tells.

    Attributes:
        lines: The lines of the log, in order of time.
        steps: The table that `log.steps` returns; empty if the log has no step lines.
        step_ms: Step time; nan if not known.
        without_data_ms: Step time of the same job without data; nan if not known.
    """

    lines: list[LogLine]
    steps: pd.DataFrame
    step_ms: float
    without_data_ms: float

    @property
    def data_percent(self) -> float:
        """What percentage of a step data costs; nan if a step time is not known."""
        return data_percent(self.step_ms, self.without_data_ms)


def read_log(job_name: str, synthetic_job: str | None = None, needs_steps: bool = True) -> JobLog:
    """Read a job's log, and decide which step times the job has, with data and without.

    The step time is what measured.py has found, or else the median of the step lines. The step time
    without data is that of `synthetic_job`, or else what measured.py has found.

    Raises:
        ValueError: a job has no log (yet), or no step lines, although `needs_steps`.
    """
    lines = logs(job_name)
    table = steps(job_name, lines) if needs_steps else step_table(lines)
    found = {"step_ms": nan if table.empty else table["step_time_ms"].median()}
    found |= {"without_data_ms": nan} | measured_numbers(line.text for line in lines)
    if synthetic_job:
        found["without_data_ms"] = read_log(synthetic_job).step_ms
    return JobLog(lines, table, found["step_ms"], found["without_data_ms"])
