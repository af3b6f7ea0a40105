"""Check the answers to the exercises of workshop.md, and break a host for lab 3.

Every check computes the right answer, from the learner's own jobs (lab 4: from the model's size).
It says in a sentence or two whether the learner's answer is right, or gives a hint. A wrong answer
raises no error.
"""

import time
from dataclasses import dataclass
from datetime import datetime, timezone
from numbers import Real
from os import sched_getaffinity
from pathlib import Path
from typing import Any

import psutil

from shared.measured import WORTH_PERCENT
from shared.monitoring.bottleneck import wait_percent
from shared.monitoring.describe import describe
from shared.monitoring.joblog import read_log
from shared.monitoring.log import GrowingLog, hosts_of, logged, step_table, steps

POINTS = 10  # lab 1: an answer may be off by so many percentage points
PERCENT = 10  # labs 2 and 4: a prediction may be off by so many percent
HEAVIER = 4  # lab 2: twice `augment` means four times the pixels, and the work
VICTIMS = ("data server", "launcher")
ENDS = ("Completed", "Failed")
RANKS = (1, 2, 4)  # lab 4
FRACTION = "That is right as a fraction: give it in percent, from 0 to 100."
WAITING = "Waiting for your answer: put it in place of None, and run this cell again."


@dataclass(frozen=True)
class Result:
    """The result of a check; `print` it."""

    right: bool
    text: str

    def __str__(self) -> str:
        return self.text


def check_waiting(
    waiting_percent: Any, held_up_by: Any, job_name: str, synthetic_job: str
) -> Result:
    """Lab 1: how much of a step does the job spend waiting for data, and what holds it up?

    What holds it up follows from what data costs: a GPU, which runs behind Python, may be busy
    while Python waits.
    """
    if waiting_percent is None or held_up_by is None:
        return Result(False, WAITING)
    if not is_number(waiting_percent):
        return _not_yet(f"waiting_percent must be a number such as 12.5, not {waiting_percent!r}.")
    if held_up_by not in ("data", "training"):
        return _not_yet(f"held_up_by must be 'data' or 'training', not {held_up_by!r}.")
    log = read_log(job_name, synthetic_job)
    truth = wait_percent(log.steps)
    is_other_part = abs(waiting_percent - (100 - truth)) < abs(waiting_percent - truth)
    if abs(waiting_percent - truth) > POINTS or is_other_part:
        if abs(waiting_percent - (100 - truth)) <= POINTS:
            hint = "That is the part of a step in which the job trains; what is the other part?"
        elif _is_fraction(waiting_percent, truth):
            hint = FRACTION
        elif abs(waiting_percent - log.steps["data_wait_ms"].median()) <= POINTS:
            hint = "That is in milliseconds: what percentage of step_time_ms is it?"
        else:
            hint = "Divide data_wait_ms by step_time_ms, for a typical line of the log."
        return _not_yet(hint)
    if held_up_by != ("data" if round(log.data_percent) >= WORTH_PERCENT else "training"):
        return _not_yet(
            "The percentage is right, but the conclusion is not: how much shorter is a step "
            f"without data? If by less than {WORTH_PERCENT} %, faster data would gain little."
        )
    return Result(
        True,
        f"Right: the job waits for {truth:.0f} % of a step (median of all {len(log.steps)} lines). "
        f"A step takes {log.step_ms:.1f} ms, and {log.without_data_ms:.1f} ms without data, so the "
        f"{held_up_by} holds it up. Answers within {POINTS} points are accepted.",
    )


def check_data_costs(costs_percent: Any, job_name: str, synthetic_job: str) -> Result:
    """With TensorFlow: by what percentage would a step of the job be shorter without data?"""
    if costs_percent is None:
        return Result(False, WAITING)
    if not is_number(costs_percent):
        return _not_yet(f"costs_percent must be a number such as 12.5, not {costs_percent!r}.")
    log = read_log(job_name, synthetic_job)
    truth = log.data_percent
    if abs(costs_percent - truth) <= POINTS:
        return Result(
            True,
            f"Right: a step takes {log.step_ms:.1f} ms, and {log.without_data_ms:.1f} ms without "
            f"data, so data costs {truth:.0f} % of it. Answers within {POINTS} percentage points "
            "are accepted.",
        )
    hint = "Compare the step time with that of the job without data."
    if abs(costs_percent - wait_percent(log.steps)) <= POINTS:
        hint = "That is the wait. Preparing data also takes cores away from the training."
    elif _is_fraction(costs_percent, truth):
        hint = FRACTION
    elif abs(costs_percent - (100 - truth)) <= POINTS:
        hint = "That is the part of a step that remains without data; what is the other part?"
    return _not_yet(hint)


def check_prediction(
    predicted_ms: Any,
    data_hosts: Any,
    heterogeneous_job: str,
    synthetic_job: str,
    cores: dict[str, int] | None,
) -> Result:
    """Lab 2: how long is a step with `data_hosts` data hosts and HEAVIER times the work on data?

    Args:
        predicted_ms: The learner's answer.
        data_hosts: The number of data hosts that the answer is for.
        heterogeneous_job: The job with one data host and the usual work.
        synthetic_job: The job without data.
        cores: {instance type: cores here} for local jobs, whose hosts share this machine's cores;
            None on AWS.
    """
    if predicted_ms is None:
        return Result(False, WAITING)
    if type(data_hosts) is not int or data_hosts < 1:
        return _not_yet(f"data_hosts must be a whole number, at least 1, not {data_hosts!r}.")
    if not is_number(predicted_ms):
        return _not_yet(f"predicted_ms must be a number of milliseconds, not {predicted_ms!r}.")
    log = read_log(synthetic_job)
    without_data_ms = log.step_ms
    samples = round((log.steps["samples_per_s"] * log.steps["step_time_ms"]).median() / 1000)
    work = HEAVIER * samples * logged(heterogeneous_job, "data_ms_per_sample")
    data_cores = data_hosts * int(logged(heterogeneous_job, "workers"))  # one per core
    limits = {"the data cores": work / data_cores, "the accelerator": without_data_ms}
    if cores is not None:
        here = len(sched_getaffinity(0))
        trainer = describe(synthetic_job)["ResourceConfig"]["InstanceType"]
        all_work = work + without_data_ms * cores[trainer]
        limits["all cores of this machine together"] = all_work / here
    limit = max(limits, key=limits.__getitem__)
    truth = limits[limit]
    if abs(predicted_ms / truth - 1) <= PERCENT / 100:
        return Result(
            True,
            f"Right: by the formula it is {truth:.1f} ms, and the limit is {limit}. Answers within "
            f"{PERCENT} % are accepted. Now measure it.",
        )
    reason = f"The limit is {limit}: only the time that this needs for one step counts."
    if predicted_ms < without_data_ms:
        least = f"{without_data_ms:.1f} ms"
        reason = f"Without data a step takes {least}: data hosts cannot make it shorter."
    elif abs(HEAVIER * predicted_ms / truth - 1) <= PERCENT / 100:
        reason = f"That is for the usual work, but now there is {HEAVIER} times as much."
    return _not_yet(reason)


def problem_with(victim: Any, expected: Any, cores: dict[str, int] | None) -> str:
    """Lab 3: say why the job cannot be started and broken yet; "" if it can."""
    if expected is None:
        return WAITING
    if cores is None:
        return "On AWS nobody can reach a host's processes: do this exercise on your machine."
    if victim not in VICTIMS:
        return f"Not yet. victim must be {' or '.join(map(repr, VICTIMS))}, not {victim!r}."
    if expected not in ENDS:
        return f"Not yet. expected must be {' or '.join(map(repr, ENDS))}, not {expected!r}."
    return ""


def kill(job_name: str, victim: str, group: str = "data_group", seconds: float = 300) -> datetime:
    """Kill a process of a local job, as a crash would, after the job's first step line.

    Args:
        job_name: The training job.
        victim: "launcher", the first process of a host, or "data server".
        group: The instance group; the process is killed on its first host.
        seconds: How long to wait for the first step line in the log.

    Returns:
        The time of the kill.

    Raises:
        ValueError: the job has ended, logs no step within `seconds`, or has no such process on this
            machine.
    """
    log, deadline = GrowingLog(job_name), time.monotonic() + seconds
    while (status := describe(job_name)["TrainingJobStatus"]) == "InProgress":
        if not step_table(lines := log.look()).empty:
            break
        if time.monotonic() > deadline:
            raise ValueError(f"{job_name!r} has logged no step within {seconds:g} s.")
        time.sleep(0.2)
    else:
        raise ValueError(f"{job_name!r} is {status} already: there is nothing left to kill.")
    host = next((name for of_group, name in hosts_of(lines) if of_group == group), "")
    if not (found := _processes(job_name, host, victim)):
        raise ValueError(f"{job_name!r} has no {victim} in {group} on this machine.")
    found[0].kill()
    print(f"Killed the {victim} on {host} ({group}).")
    return datetime.now(timezone.utc)


def check_ending(expected: str, job_name: str, killed_at: datetime, undisturbed: str) -> Result:
    """Lab 3: did the job end as expected, and did the training miss a batch?

    The same batches in the same order give the same loss. So this compares the loss in each step
    line with that of `undisturbed`, a job with the same hyperparameters.
    """
    job = describe(job_name)
    status = job["TrainingJobStatus"]
    reason = f" ({job['FailureReason']})" if job.get("FailureReason") else ""
    told = [f"the job is {status}{reason}."]
    losses = [steps(name).set_index("step")["loss"] for name in (job_name, undisturbed)]
    both = losses[0].index.intersection(losses[1].index)
    differ = int((losses[0][both] != losses[1][both]).sum())
    if differ or both.empty:
        told.append(f"In {differ} of {len(both)} step lines its loss is not that of {undisturbed}.")
    else:
        told.append(
            f"Up to step {both[-1]} no batch was lost: in all {len(both)} step lines the loss is "
            f"that of {undisturbed}."
        )
    if status == "Failed":
        phases = {phase["Status"]: phase for phase in job["SecondaryStatusTransitions"]}
        waited = (phases["Training"]["EndTime"] - killed_at).total_seconds()
        told.append(f"The last host, and with it the billing, ended {waited:.0f} s after the kill.")
    right = expected == status
    hints = {
        "Completed": " Who starts a data server again, and who prepares the batches until then?",
        "Failed": " The launcher is its container's first process: what starts it again?",
    }
    hint = "" if right else hints.get(status, "")
    return Result(right, f"{'Right' if right else 'No'}: {' '.join(told)}{hint}")


def check_state(state_bytes: Any, parameters: float) -> Result:
    """Lab 4: how many bytes of state does rank 0 keep, with DDP and with FSDP, on RANKS ranks?

    Args:
        state_bytes: The learner's answer, {"ddp": [bytes for each of RANKS], "fsdp": [...]}.
        parameters: How many parameters the model has. Adam trains them, all in float32.
    """
    if state_bytes is None:
        return Result(False, WAITING)
    if not is_number(parameters) or parameters < 1:
        return _not_yet(f"parameters must be the number in section 9, not {parameters!r}.")
    if not _is_table(state_bytes):
        return _not_yet(
            'state_bytes must be {"ddp": [...], "fsdp": [...]}, with the bytes on 1, 2 and 4 ranks '
            f"in each list, not {state_bytes!r}."
        )
    one, *more = state_bytes["ddp"]
    whole = 4 * 4 * parameters  # the parameter, its gradient and two moments, of four bytes each
    if not _close([one], [whole]):
        hints = {
            1e-6: "That is right in MB: give it in bytes.",
            1 / 4: "Those are the parameters alone: what else does a rank keep for each of them?",
            1 / 2: "What does Adam keep for each parameter, besides its gradient?",
            3 / 4: "Adam keeps two moments for each parameter: of the gradient, and of its square.",
        }
        found = [hint for part, hint in hints.items() if _close([one], [part * whole])]
        return _not_yet(
            *found or ["Begin with one rank: how many numbers does it keep per parameter?"]
        )
    if not _close(more, [whole] * len(more)):
        return _not_yet("With DDP every rank has the whole model, however many ranks there are.")
    if not _close(state_bytes["fsdp"], [whole / ranks for ranks in RANKS]):
        return _not_yet("With FSDP each of N ranks keeps 1/N of all that a rank keeps with DDP.")
    return Result(
        True,
        f"Right: 16 bytes for each of {parameters:,.0f} parameters, which FSDP divides by the "
        f"number of ranks. Answers within {PERCENT} % are accepted. Now measure it.",
    )


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < 1e300


def _is_table(answer: Any) -> bool:
    """Whether an answer to lab 4 has a number for DDP and for FSDP on each of RANKS."""
    return (
        isinstance(answer, dict)
        and answer.keys() == {"ddp", "fsdp"}
        and all(isinstance(row, list | tuple) and len(row) == len(RANKS) for row in answer.values())
        and all(is_number(value) for row in answer.values() for value in row)
    )


def _is_fraction(value: float, percent: float) -> bool:
    """Whether a value would be a right answer if it were not a fraction of 1."""
    return 0 < value <= 1 and abs(100 * value - percent) <= POINTS


def _close(values: list[float], truth: list[float]) -> bool:
    """Whether each value is within PERCENT of the right one."""
    pairs = zip(values, truth, strict=True)
    return all(abs(value / right - 1) <= PERCENT / 100 for value, right in pairs)


def _not_yet(hint: str) -> Result:
    return Result(False, f"Not yet. {hint}")


def _processes(job_name: str, host: str, victim: str) -> list[psutil.Process]:
    """Find a host's processes by the /opt/ml in their environment, oldest first.

    The host's oldest process is its launcher. The data server's processes have HETERO_SERVE_AT,
    which hetero/ sets; the oldest of them has forked the others.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environment, started = process.environ(), process.create_time()
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        opt_ml = Path(environment.get("SAGEMAKER_BASE_DIR", ""))
        is_there = environment.get("TRAINING_JOB_NAME") == job_name and host in opt_ml.parts
        if is_there and (victim == "launcher" or "HETERO_SERVE_AT" in environment):
            found.append((started, process.pid, process))
    return [process for *_, process in sorted(found, key=lambda entry: entry[:2])]
