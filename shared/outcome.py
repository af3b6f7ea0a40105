"""How close does a heterogeneous job come to the best that its cores could give?

    possible step = the larger of  the step time without data
                                   the data's CPU work / all cores that prepare data

Both come from what was known before the heterogeneous job ran: the times from the homogeneous job
(and the job without data beside it), the cores from the cluster. No time that the heterogeneous job
has measured is part of it, or every job would come close to what it has reached.

There is no verdict if the numbers contradict each other, or if other programs took the CPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan

from shared import prices
from shared.monitoring.bottleneck import QUIET_PERCENT, observe, others_percent
from shared.monitoring.describe import describe
from shared.monitoring.joblog import read_log
from shared.monitoring.log import logged, logs

TOLERANCE = 1.05  # by so much, the times of two equal jobs may differ


@dataclass(frozen=True)
class Outcome:
    """A heterogeneous job, compared with what was possible; `print` it.

    Attributes:
        homogeneous_ms: Step time of the homogeneous job.
        heterogeneous_ms: Step time of the heterogeneous job.
        without_data_ms: Step time without data.
        work_ms: CPU time that a step's data takes on one core, in core-ms.
        cores: How many cores prepare data in the heterogeneous job.
        disturbed: Which jobs other programs have disturbed, and how; "" if none.
    """

    homogeneous_ms: float
    heterogeneous_ms: float
    without_data_ms: float
    work_ms: float
    cores: float
    disturbed: str = ""

    @property
    def possible_ms(self) -> float:
        """The step time that was possible."""
        return max(self.without_data_ms, self.work_ms / self.cores if self.cores else inf)

    @property
    def problem(self) -> str:
        """Why the numbers allow no verdict; "" if they do."""
        if self.without_data_ms > TOLERANCE * self.homogeneous_ms:
            return (
                f"without data a step took longer ({self.without_data_ms:.1f} ms) than in the "
                f"homogeneous job ({self.homogeneous_ms:.1f} ms)"
            )
        if TOLERANCE * self.heterogeneous_ms < self.possible_ms:
            return (
                f"the heterogeneous job's steps took {self.heterogeneous_ms:.1f} ms, less than was "
                f"possible by the numbers of the homogeneous job ({self.possible_ms:.1f} ms)"
            )
        return self.disturbed

    def __str__(self) -> str:
        least = f"{self.work_ms / self.cores:.1f} ms" if self.cores else "no limit known"
        lines = [
            f"possible: {self.possible_ms:.1f} ms a step, the larger of two times:",
            f"  {self.without_data_ms:.1f} ms, a step without data",
            f"  {least}, the data's CPU work: {self.work_ms:.0f} core-ms / {self.cores:g} cores",
        ]
        gain = self.homogeneous_ms / self.heterogeneous_ms
        if self.problem:
            lines.append(f"speed-up: {gain:.2f}; no verdict, because {self.problem}.")
            lines.append("Run the notebook again, on a machine that does nothing else.")
        else:
            most = max(gain, self.homogeneous_ms / self.possible_ms)
            lines.append(f"speed-up: {gain:.2f} of at most {most:.2f}")
            lines.append(f"          = {gain / most:.0%} of what was possible")
        return "\n".join(lines)


def judge(
    homogeneous_job: str,
    heterogeneous_job: str,
    synthetic_job: str | None = None,
    cores: Mapping[str, int] | None = None,
) -> Outcome:
    """Compare a heterogeneous job with what was possible.

    Args:
        homogeneous_job: The job whose training host prepares its own data. It logs
            data_ms_per_sample, as the examples do.
        heterogeneous_job: The job to judge.
        synthetic_job: The homogeneous job without data. Not needed if the homogeneous job's script
            used measured.py.
        cores: {instance type: cores here} for local jobs; None on AWS.

    Raises:
        ValueError: a job is unknown or has logged no steps, the step time without data is unknown,
            or shared/prices.csv lacks an instance type.
    """
    log = read_log(homogeneous_job, synthetic_job)
    if isnan(log.without_data_ms):
        raise ValueError(
            f"How long a step of {homogeneous_job!r} takes without data is not known: give the name"
            " of the same job with --data-mode synthetic, or use measured.py in its script."
        )
    samples = round((log.steps["samples_per_s"] * log.steps["step_time_ms"]).median() / 1000)
    jobs = {"homogeneous": homogeneous_job, "heterogeneous": heterogeneous_job}
    return Outcome(
        log.step_ms,
        read_log(heterogeneous_job).step_ms,
        log.without_data_ms,
        samples * logged(homogeneous_job, "data_ms_per_sample"),
        preparing_cores(heterogeneous_job, cores),
        _disturbed(jobs | {"data-free": synthetic_job}),
    )


def preparing_cores(job_name: str, cores: Mapping[str, int] | None = None) -> int:
    """Count the cores that prepare data in a job: those of its data hosts, and spare ones.

    Training hosts log their number of spare cores when they start.
    """
    groups = describe(job_name)["ResourceConfig"].get("InstanceGroups") or []
    trainers = {line.group for line in logs(job_name) if line.text.startswith("spare_cores=")}
    found = 0
    for group in groups:
        kind, count = group["InstanceType"], group["InstanceCount"]
        if group["InstanceGroupName"] in trainers:
            found += count * int(logged(job_name, "spare_cores"))
        else:
            found += count * (cores[kind] if cores else prices.price_of(kind).vcpus)
    return found


def _disturbed(jobs: Mapping[str, str | None]) -> str:
    """Say in which jobs other programs took more of the CPUs than QUIET_PERCENT."""
    taken = {label: others_percent(observe(name)) for label, name in jobs.items() if name}
    busy = {label: percent for label, percent in taken.items() if percent > QUIET_PERCENT}
    named = ", ".join(f"{percent:.0f} % during the {label} job" for label, percent in busy.items())
    return f"other programs took CPU time: {named}" if busy else ""
