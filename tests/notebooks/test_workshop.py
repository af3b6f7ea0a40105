"""The PyTorch notebook with workshop.md's exercises: unanswered, solved, answered wrongly.

One kernel runs the whole notebook with real jobs, on less data. All tests use that kernel, and
start no further jobs. (nbval runs the other notebooks unchanged.)
"""

import ast
import re
import textwrap
from collections.abc import Iterator

import nbformat
import pytest
from nbclient import NotebookClient

from helpers import permissions
from helpers.pages import PYTORCH_NOTEBOOK, SOLUTIONS
from shared import workshop

# Seven jobs, in the first test that asks for the lab: eight minutes on a slow machine, and twice
# that beside other tests.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.first]
CELLS = nbformat.read(PYTORCH_NOTEBOOK, as_version=4).cells
EXERCISES = [cell.source for cell in CELLS if "exercise" in cell.metadata.get("tags", [])]
# Less data, but more work on each sample: beside other tests, the two times of a step, with data
# and without, must not come close to each other.
CHANGES = {
    '"model": "small", "augment": 4': '"model": "small", "augment": 6',
    '"digits": 12_000': '"digits": 1_280',
    '("t10k", 2_000, 2)': '("t10k", 64, 2)',
    '"batch-size": 128, "max-steps": 150': '"batch-size": 32, "max-steps": 60',
    '"heterogeneous steps": 150': '"heterogeneous steps": 60',
    "--max-steps 31 --log-every 31": "--max-steps 5 --log-every 5",
    "for ranks in (1, 2, 4)": "for ranks in (1,)",  # section 9 has measured 2
    '{"spare-cores": 0}': '{"spare-cores": 0, "max-steps": 30}',
    # The notebook's first job checks its requirements, as all would.
    'source_dir="code", requirements="requirements.txt", ': 'source_dir="code", ',
}
ANSWER = re.compile(r"^\w+ = None\b.*\n", re.M)


def solved(exercise: str, solution: str) -> str:
    """Replace the exercise's first line to fill in with the solution, and remove the others."""
    return ANSWER.sub("", ANSWER.sub(lambda _: solution, exercise, count=1))


def shown_by(output: nbformat.NotebookNode) -> object:
    """Return what a cell's output shows: printed text, or the data of a figure or table."""
    return output.text if output.output_type == "stream" else output.data


class Lab:
    """A learner's kernel, and the output of the exercises in it."""

    def __init__(self, client: NotebookClient):
        self.client, self.unanswered, self.said = client, [], []

    def run(self, source: str) -> str:
        """Run `source` in a new cell; return what it prints."""
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        self.client.execute_cell(cells[-1], len(cells) - 1)
        return "".join(output.get("text", "") for output in cells[-1].outputs)

    def check(self, call: str) -> str:
        """Return what a check in `shared/workshop.py` says."""
        return self.run(f"print(workshop.{call})").strip()

    def go_through(self) -> None:
        """Run the notebook's cells; run each exercise without an answer, then solved."""
        solutions = iter([*SOLUTIONS[:3], *SOLUTIONS[4:]])
        for cell in CELLS:
            tags, source = cell.metadata.get("tags", []), cell.source
            if cell.cell_type != "code":
                continue
            for old, new in CHANGES.items():
                source = source.replace(old, new)
            output = self.run(source)
            if "nbval-check-output" in tags:
                shown = [shown_by(output) for output in self.client.nb.cells[-1].outputs]
                assert shown == [shown_by(output) for output in cell.outputs]
            if "exercise" in tags:
                self.unanswered.append(output.strip())
                self.said.append(self.run(solved(source, next(solutions))))
        self.said.append(self.run(solved(EXERCISES[2], SOLUTIONS[3])))  # lab 3 has two


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Run the whole notebook, and yield its kernel."""
    assert all(sum(old in cell.source for cell in CELLS) == 1 for old in CHANGES)
    resources = {"metadata": {"path": str(PYTORCH_NOTEBOOK.parent)}}
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=600, resources=resources)
    with client.setup_kernel():
        lab = Lab(client)
        lab.go_through()
        yield lab


def test_without_answers_the_exercises_wait_and_start_no_job(lab: Lab):
    assert len(EXERCISES) == 4 and all(map(ANSWER.search, EXERCISES))
    assert len(SOLUTIONS) == 5 and not any("None" in solution for solution in SOLUTIONS)
    assert lab.unanswered == [workshop.WAITING] * 4
    # Four jobs are the notebook's, one is lab 2's, two are lab 3's. Wrong answers start none.
    assert int(lab.run("print(len(local.jobs))")) == 7


def test_solutions_are_right(lab: Lab):
    waiting, prediction, server, state, launcher = lab.said
    assert waiting.startswith("Right: the job waits for ")
    assert prediction.startswith("Right: by the formula it is ")
    assert state.startswith("Right: 16 bytes for each of 1,199,882 parameters")
    for said in (server, launcher):
        assert "no batch was lost" in said, said
    assert "Killed the data server on algo-" in server
    assert "Right: the job is Completed." in server
    assert "Killed the launcher on algo-" in launcher
    reason = r"AlgorithmError: The launcher on algo-\d \(data_group\) is gone: connection closed\."
    assert re.search(rf"Right: the job is Failed \({reason}", launcher), launcher
    seconds = re.search(r"the billing, ended (\d+) s after the kill", launcher)
    assert int(seconds[1]) <= 15, launcher  # the limit in the table in pt.grpc.sagemaker/job.md


def test_a_right_prediction_is_followed_by_the_measurement(lab: Lab):
    """The cell after the prediction uses the prediction, and starts the fourth job."""
    settings = "boto3.client('sagemaker').describe_training_job(TrainingJobName=more_job)"
    run = lab.run(f"job = {settings}; print(job['HyperParameters'], job['ResourceConfig'])")
    assert "'augment': '12'" in run and "'InstanceCount': 2" in run, run
    assert float(lab.run("print(measured)")) > 0


def test_ranks_keep_as_many_bytes_as_lab_4_says(lab: Lab):
    predicted = ast.literal_eval(lab.run("print(state_bytes)"))
    for name in ("ddp", "fsdp"):
        bytes_of_both = f"[kept['ranks: 1'][{name!r}], runs[{name!r}]['state_bytes_per_rank']]"
        measured = ast.literal_eval(lab.run(f"print({bytes_of_both})"))
        assert measured == pytest.approx(predicted[name][:2], rel=1e-5)


def test_the_killed_data_server_was_started_again(lab: Lab):
    names = "[job.job_name for job in local.jobs.values()]"  # the first "broken" one of several
    [server] = lab.run(f"print([name for name in {names} if 'broken' in name][0])").split()
    log = lab.run(f"monitoring.show_logs({server!r}, last=None)")
    assert "feed.server was killed by signal 9; restart in 1 s" in log, log


TRUE_WAIT = "workshop.wait_percent(monitoring.steps(homogeneous_job))"
PREDICTED = "data_hosts, heterogeneous_job, synthetic_job, cores)"
BOTH = "homogeneous_job, synthetic_job)"
STEP, FLOOR = (
    f"monitoring.steps({job})['step_time_ms'].median()"
    for job in ("homogeneous_job", "synthetic_job")
)
END = "broken_job, killed_at, heterogeneous_job)"


@pytest.mark.parametrize(
    "call, hint",
    [
        (f"check_waiting(None, 'data', {BOTH}", workshop.WAITING),
        (f"check_waiting('49 %', 'data', {BOTH}", "a number such as 12.5, not '49 %'"),
        (f"check_waiting({TRUE_WAIT}, 'CPU', {BOTH}", "'data' or 'training', not 'CPU'"),
        (f"check_waiting({TRUE_WAIT}, 'training', {BOTH}", "the conclusion is not"),
        (f"check_waiting({TRUE_WAIT} + 500, 'data', {BOTH}", "Divide data_wait_ms"),
        (f"check_waiting({TRUE_WAIT} / 100, 'data', {BOTH}", workshop.FRACTION),
        (f"check_waiting(100 - {TRUE_WAIT}, 'data', {BOTH}", "in which the job trains"),
        (f"check_prediction(None, {PREDICTED}", workshop.WAITING),
        (f"check_prediction('fast', {PREDICTED}", "a number of milliseconds, not 'fast'"),
        ("check_prediction(1, 0.5, heterogeneous_job, synthetic_job, cores)", "whole number"),
        (f"check_prediction(0.001, {PREDICTED}", "data hosts cannot make it shorter"),
        (f"check_prediction(1e6, {PREDICTED}", "The limit is "),
        (f"check_prediction(1.2 * predicted_ms, {PREDICTED}", "The limit is "),
        (f"check_data_costs(None, {BOTH}", workshop.WAITING),
        (f"check_data_costs('49 %', {BOTH}", "must be a number such as 12.5, not '49 %'"),
        (f"check_data_costs(500, {BOTH}",
         "Compare the step time with that of the job without data"),
        (f"check_data_costs(1 - {FLOOR} / {STEP}, {BOTH}", workshop.FRACTION),
        ("check_state(None, 1000)", workshop.WAITING),
        ("check_state({'ddp': [0.016] * 3, 'fsdp': [0.016] * 3}, 1000)", "in MB: give it in bytes"),
        ("check_state({'ddp': [16000]}, 1000)", "state_bytes must be {"),
        ("check_state({'ddp': [4000] * 3, 'fsdp': [4000] * 3}, 1000)", "the parameters alone"),
        ("check_state({'ddp': [99] * 3, 'fsdp': [99] * 3}, 1000)", "how many numbers does it keep"),
        ("check_state({'ddp': [16000, 8000, 4000], 'fsdp': [1] * 3}, 1000)", "has the whole model"),
        ("check_state({'ddp': [16000] * 3, 'fsdp': [16000] * 3}, 1000)", "keeps 1/N of all"),
        ("problem_with('feed.server', None, cores)", workshop.WAITING),
        ("problem_with('feed.server', 'Failed', None)", "On AWS nobody can reach"),
        ("problem_with('train.py', 'Failed', cores)", "not 'train.py'"),
        ("problem_with('launcher', 'failed', cores)", "not 'failed'"),
        (f"check_ending('Completed', {END}", "first process: what starts it"),
        ("check_ending('Completed', more_job, killed_at, heterogeneous_job)", "its loss is not"),
    ],
)  # fmt: skip
def test_wrong_answers_get_a_hint(lab: Lab, call: str, hint: str):
    said = lab.check(call)
    assert hint in said and len(said.splitlines()) == 1, said
    assert not said.startswith("Right") or "its loss is not" in said


def test_answers_within_the_tolerance_are_right(lab: Lab):
    for call in (
        f"check_waiting({TRUE_WAIT} - 9, 'data', {BOTH}",
        f"check_prediction(1.09 * predicted_ms, {PREDICTED}",
        f"check_data_costs(100 * (1 - {FLOOR} / {STEP}) + 9, {BOTH}",
    ):
        assert lab.check(call).startswith("Right")


def test_nothing_is_killed_in_a_job_that_has_ended(lab: Lab):
    said = lab.run(
        "try:\n    workshop.kill(heterogeneous_job, 'launcher')\n"
        "except ValueError as error:\n    print(error)"
    )
    assert "is Completed already: there is nothing left to kill." in said


COMMANDS = """
from shared import advisor, costs, monitoring
costs.main([homogeneous_job, heterogeneous_job])
monitoring.main([homogeneous_job])
monitoring.main([heterogeneous_job, "--logs"])
advisor.main(["--job", homogeneous_job, "--synthetic-job", synthetic_job])
"""


def test_all_that_was_asked_of_aws_is_in_the_policy_also_by_the_commands_and_the_clean_up(lab: Lab):
    """The kernel denies all other calls (conftest.py). Only the SDK's optional calls need more."""
    text = "\n".join(cell.source for cell in CELLS if cell.cell_type != "code")
    blocks = re.findall(r"^ *```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    [clean_up] = [textwrap.dedent(block) for block in blocks if "delete()" in block]
    lab.run(COMMANDS)
    lab.run(clean_up)
    allowed, absent = ast.literal_eval(lab.run("print([sorted(allowed), sorted(absent)])"))
    assert set(absent) == permissions.TOLERATED
    needed = {"CreateTrainingJob", "GetLogEvents", "HeadBucket", "DeleteObjects"}
    assert needed | {"GetMetricStatistics"} <= {*allowed}
