"""Where a job's numbers come from: the line that measured.py prints, or two training jobs."""

import json
from collections.abc import Iterable, Mapping
from math import nan
from typing import Any

from shared.advisor.prediction import Measured
from shared.measured import NOTICE

NUMBERS = '{"measured": '  # with which measured.py's line begins


def numbers_in(lines: Iterable[str]) -> dict[str, Any]:
    """Find what measured.py has printed among the lines of a log; the last, if there are several.

    Returns:
        What `from_numbers` takes; empty if there is no such line.

    Raises:
        ValueError: the line is not whole.
    """
    found = [start + rest for _, start, rest in (line.partition(NUMBERS) for line in lines)]
    text = next((text for text in reversed(found) if text), "")
    try:  # what comes after it, such as the end of a colour, does not matter
        return json.JSONDecoder().raw_decode(text)[0]["measured"] if text else {}
    except ValueError:
        raise ValueError(f"The line of numbers is not whole: {text.strip()[:60]}...") from None


def from_numbers(numbers: Mapping[str, Any]) -> Measured:
    """Take a job's numbers as measured.py has them, by the names of Measured's attributes.

    Raises:
        ValueError: they cannot be, or lack something.
    """
    try:
        floor, note = _floor(numbers["step_ms"], numbers["accelerator_ms"])
        source = numbers.get("source", "") + note
        return Measured(**{**numbers, "accelerator_ms": floor, "source": source})
    except (KeyError, TypeError):
        raise ValueError(f"These are not the numbers of measured.py: {dict(numbers)}.") from None


def _floor(step_ms: float, accelerator_ms: float) -> tuple[float, str]:
    """Step time without data, which only noise or a mistake can make longer; and what to say."""
    if accelerator_ms <= 1.05 * step_ms:
        return min(accelerator_ms, step_ms), ""
    return step_ms, (
        f", whose steps were longer, {accelerator_ms:,.0f} ms, and count as equally long: either "
        "the machine was busy with other things, or the two are swapped"
    )


def measure(job_name: str, synthetic_job: str | None = None) -> Measured:
    """Read a homogeneous training job's numbers: times from its log, utilisation from CloudWatch.

    Args:
        job_name: A homogeneous job that has ended. Its step time is the median of its step lines.
            If it was run with measured.py, all numbers are from what that has printed.
        synthetic_job: The same job with --data-mode synthetic, for the accelerator floor.

    Raises:
        ValueError: there is no such job, it runs, it failed, it is heterogeneous, or has no steps.
    """
    # Not above: images for training lack packages that it needs, but may have measured.py.
    from shared import monitoring

    group = instance_type, count = _instances(job_name)
    lines = [line.text for line in monitoring.logs(job_name)]
    if numbers := numbers_in(lines):
        if synthetic_job:
            raise ValueError(f"{job_name!r} has measured both step times: give no second job.")
        source = f"Job {job_name}: {numbers.get('source', '')}"
        known = {"instance_type": instance_type, "count": count, "source": source}
        return from_numbers({**numbers, **known})
    if any(NOTICE in line for line in lines):
        raise ValueError(f"{job_name!r} was for measuring, but its log has no result of it.")
    step_ms, use = _read_job(job_name)
    accelerator_ms, without_data, source = nan, {"CPU": nan}, f"Job {job_name}"
    if synthetic_job:
        other = _instances(synthetic_job)
        if other != group:
            raise ValueError(f"{job_name!r} ran on {group}, but {synthetic_job!r} on {other}.")
        accelerator_ms, without_data = _read_job(synthetic_job)
        accelerator_ms, note = _floor(step_ms, accelerator_ms)
        source += f"; without data, job {synthetic_job}{note}"
    return Measured(
        instance_type,
        step_ms,
        count,
        accelerator_ms,
        use["CPU"],
        use["GPU"],
        without_data["CPU"],
        source=source,
    )


def _instances(name: str) -> tuple[str, int]:
    """Instance type and count of a homogeneous job that has ended."""
    from shared.monitoring.describe import describe, instances_of

    job = describe(name)
    status = job["TrainingJobStatus"]
    if status not in ("Completed", "Stopped"):
        raise ValueError(f"Training job {name!r} is {status}: give one that has run to its end.")
    instances = instances_of(job["ResourceConfig"])
    if len(instances) > 1:
        raise ValueError(
            f"Training job {name!r} is heterogeneous already ({', '.join(instances)}): give the "
            "homogeneous one, whose data is prepared on the instances that train."
        )
    return next(iter(instances.items()))


def _read_job(name: str) -> tuple[float, dict[str, float]]:
    """Median step time in ms, and percent of CPUs and GPUs in use."""
    from shared import monitoring

    step_ms = float(monitoring.steps(name)["step_time_ms"].median())
    table = monitoring.utilisation(name).reindex(columns=["CPU (%)", "GPU (%)"])
    use = table.mean(skipna=False).clip(upper=100)  # hosts are of one type
    return step_ms, {unit: float(use[f"{unit} (%)"]) for unit in ("CPU", "GPU")}
