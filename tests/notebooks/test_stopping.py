"""Interrupting a notebook's cell does not stop its job, so the notebooks say how to stop it."""

import re
from importlib.metadata import version
from pathlib import Path

import boto3
import nbformat
import pytest
from sagemaker.core.training.configs import Compute, InputData, SourceCode
from sagemaker.train import ModelTrainer

from helpers.pages import NOTEBOOKS, PYTORCH_NOTEBOOK

PRINTED = [
    """print('To stop it: boto3.client("sagemaker").stop_training_job(')""",
    """print(f'    TrainingJobName="{name}")')""",
]


def sources(notebook: Path, cell_type: str) -> list[str]:
    """Return the source of the notebook's cells of one type."""
    cells = nbformat.read(notebook, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == cell_type]


def test_the_sdk_still_says_which_job_it_has_started():
    assert "_latest_training_job" in ModelTrainer.__private_attributes__, (
        f"SageMaker's SDK {version('sagemaker')} has no ModelTrainer._latest_training_job, which "
        "is not public: the notebooks and tests/helpers/jobs.py must get a job's name another way."
    )


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_say_that_an_interrupted_job_goes_on(notebook: Path):
    (text,) = [text for text in sources(notebook, "markdown") if "**Interrupting" in text]
    assert (
        "does not stop its job.** The job goes on until it ends, and on AWS you pay for it"
        in " ".join(text.split())
    )
    lines = "\n".join(sources(notebook, "code")).splitlines()
    (number,) = [i for i, line in enumerate(lines) if "_latest_training_job" in line]
    assert [line.strip() for line in lines[number + 1 : number + 3]] == PRINTED


def test_the_line_that_is_printed_stops_the_job(local, jobs, tmp_path: Path, capsys):
    (source,) = [text for text in sources(PYTORCH_NOTEBOOK, "code") if "def submit(" in text]
    names: dict = {"ModelTrainer": ModelTrainer, "InputData": InputData, "boto3": boto3}
    exec(source[source.index("def submit(") :], names)
    (tmp_path / "any.py").touch()
    trainer = ModelTrainer(
        role=local.role,
        training_image="any",
        source_code=SourceCode(source_dir=str(tmp_path), command="exec sleep 100"),
        compute=Compute(instance_type="ml.c5.xlarge", instance_count=1),
        base_job_name="test-stopping",
    )
    job = names["submit"](trainer)
    exec(re.search(r"^To stop it: (.*\n.*)$", capsys.readouterr().out, re.M)[1], names)
    assert jobs.wait(job)["TrainingJobStatus"] == "Stopped"
