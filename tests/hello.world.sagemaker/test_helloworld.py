"""hello world's train.py in images whose toolkit is older, missing or wrong."""

from pathlib import Path

import pytest

from helpers.jobs import Jobs

pytestmark = pytest.mark.usefixtures("nothing_is_left")
CODE = Path(__file__).parents[2] / "hello.world.sagemaker" / "code"
GROUPS = {"dnn_group": ("ml.m5.xlarge", 1)}  # the notebook has two
# The toolkit that is installed here, without what version 5.0.0 lacks.
OLDER = """
import runpy
from sagemaker_training.environment import Environment
del Environment.topology
runpy.run_path("train.py", run_name="__main__")
"""
DIFFERS = OLDER.replace("del Environment.topology", "Environment.is_master = None")
MISSING = """
import runpy, sys
sys.modules["sagemaker_training"] = None
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "script, status, line",
    [
        (OLDER, "Completed", "This image's toolkit does not know: topology."),
        (MISSING, "Completed", "No sagemaker_training toolkit in this image: read by hand only."),
        (DIFFERS, "Failed", "The toolkit and resourceconfig.json differ in ['is_master']."),
    ],
)
def test_a_toolkit_may_know_less_but_not_differ(script: str, status: str, line: str, jobs: Jobs):
    files = {"train.py": (CODE / "train.py").read_text(), "start.py": script}
    job = jobs.run(files, "python start.py", GROUPS)
    assert job["TrainingJobStatus"] == status
    log = jobs.log(job["TrainingJobName"])
    assert log.count(line) == 1
    assert log.count("is_master: True") == (1 if status == "Completed" else 0)
