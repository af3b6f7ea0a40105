"""Where a job's numbers come from: the line that measured.py prints, or two training jobs."""

from collections.abc import Mapping
from math import nan
from typing import Any

from shared.advisor.prediction import Measured
from shared.measured import NOTICE
from shared.measured_line import measured_numbers


def from_numbers(numbers: Mapping[str, Any]) -> Measured:
    """Convert the numbers that measured.py printed, whose names are Measured's attributes.

    Raises:
        ValueError: a number is missing, unknown or out of range.
    """
    try:
        without_data_ms, note = _plausible(numbers["step_ms"], numbers["without_data_ms"])
        new = {"without_data_ms": without_data_ms, "source": numbers.get("source", "") + note}
        for name in {"cpu_percent", "training_cpu_percent"} & numbers.keys():
            new[name] = min(numbers[name], 100.0)  # older copies of measured.py did not clip it
        return Measured(**{**numbers, **new})
    except (KeyError, TypeError):
        raise ValueError(f"measured.py does not print such numbers: {dict(numbers)}.") from None


def _plausible(step_ms: float, without_data_ms: float) -> tuple[float, str]:
    """Return the step time without data, at most `step_ms`, and a note if it was clearly longer.

    Only noise or a mistake can make it longer. nan stays nan.
    """
    if without_data_ms > 1.05 * step_ms:
        return step_ms, (
            f", whose steps were longer, {without_data_ms:,.0f} ms, and count as equally long: "
            "either the machine was busy with other things, or the two are swapped"
        )
    return min(without_data_ms, step_ms), ""


def read_job(job_name: str, synthetic_job: str | None = None) -> Measured:
    """Read a homogeneous training job's numbers: times from its log, utilisation from CloudWatch.

    Args:
        job_name: A homogeneous job that has ended. Its step time is the median of its step lines.
            If its script used measured.py, all numbers are those that measured.py printed.
        synthetic_job: The same job with --data-mode synthetic, for the step time without data.

    Raises:
        ValueError: there is no such job, or it is running, has failed, is heterogeneous, or has
            logged no steps.
    """
    # Imported here: images for training lack packages that it needs, but may use measured.py.
    from shared import monitoring
    from shared.monitoring.joblog import read_log

    group = instance_type, count = _instances(job_name)
    lines = [line.text for line in monitoring.logs(job_name)]
    if numbers := measured_numbers(lines):
        if synthetic_job:
            raise ValueError(f"{job_name!r} has measured both step times: omit synthetic_job.")
        source = f"Job {job_name}: {numbers.get('source', '')}"
        known = {"instance_type": instance_type, "count": count, "source": source}
        return from_numbers({**numbers, **known})
    if any(NOTICE in line for line in lines):
        raise ValueError(
            f"{job_name!r} used measured.py, but its log has no result: look there for the reason."
        )
    if synthetic_job and (other := _instances(synthetic_job)) != group:
        raise ValueError(
            f"{job_name!r} ran on {group}, but {synthetic_job!r} ran on {other}: run both on the "
            "same instances."
        )
    log, (cpu, gpu) = read_log(job_name, synthetic_job), _use(job_name)
    without_data_ms, note = _plausible(log.step_ms, log.without_data_ms)
    training_cpu, source = nan, f"Job {job_name}"
    if synthetic_job:
        training_cpu, _ = _use(synthetic_job)
        source += f"; without data, job {synthetic_job}{note}"
    return Measured(
        instance_type, log.step_ms, count, without_data_ms, cpu, gpu, training_cpu, source=source
    )


def _instances(name: str) -> tuple[str, int]:
    """Return instance type and count of a homogeneous job that has ended."""
    from shared.monitoring.describe import describe, instances_of

    job = describe(name)
    status = job["TrainingJobStatus"]
    if status not in ("Completed", "Stopped"):
        raise ValueError(f"Training job {name!r} is {status}: give a Completed or Stopped job.")
    instances = instances_of(job["ResourceConfig"])
    if len(instances) > 1:
        raise ValueError(
            f"Training job {name!r} is already heterogeneous ({', '.join(instances)}): give the "
            "homogeneous job, whose training instances prepare the data."
        )
    return next(iter(instances.items()))


def _use(name: str) -> tuple[float, float]:
    """Return how busy a job's CPUs and GPUs were, in percent."""
    from shared import monitoring

    table = monitoring.utilisation(name).reindex(columns=["CPU (%)", "GPU (%)"])
    use = table.mean(skipna=False).clip(upper=100)  # all hosts have the same type
    return float(use["CPU (%)"]), float(use["GPU (%)"])
