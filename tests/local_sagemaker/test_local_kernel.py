"""The process that users work in: what it sees of a job, and what happens when the process ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs import ROOT, processes_naming, start_kernel
from helpers.waiting import wait_until_gone

pytestmark = pytest.mark.usefixtures("nothing_is_left")

thorough = pytest.mark.thorough
SLEEPING_JOB = """
name = jobs.create({"train.py": "import time; print('ready'); time.sleep(100)"},
                   "exec python train.py", {"a": ("ml.c5.xlarge", 2), "b": ("ml.m5.xlarge", 1)})
jobs.wait_for_log(name, "ready")
print("RUNNING", flush=True)
"""


ENDS = {
    "a stop, though a forked child holds a copy of every pipe": (
        "if os.fork() == 0: time.sleep(20); os._exit(0)\n"
        "session.stop(); os.kill(os.getpid(), signal.SIGKILL)"
    ),
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT); time.sleep(100)",
    "exit": "",
    "SIGKILL, though a forked child lives on": (
        "if os.fork() == 0: time.sleep(60); os._exit(0)\nos.kill(os.getpid(), signal.SIGKILL)"
    ),
}


@pytest.mark.parametrize(
    "end", [end if end.startswith("a stop") else pytest.param(end, marks=thorough) for end in ENDS]
)
def test_no_host_outlives_the_kernel(tmp_path: Path, temporary_folder: Path, end: str):
    process = start_kernel(SLEEPING_JOB + ENDS[end], tmp_path)
    try:
        assert any(line.startswith("RUNNING") for line in process.stdout)
        wait_until_gone(lambda: processes_naming(f"{temporary_folder}/local-sagemaker-"), seconds=5)
        process.wait(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_nothing_leaves_this_machine_and_no_secret_gets_into_a_log(tmp_path: Path):
    """Watch every connection of the user's process; its environment has secrets and endpoints."""
    body = """
import socket
outside = []
connect = socket.socket.connect
def watched(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith("127."):
        outside.append(address)
    return connect(self, address)
socket.socket.connect = watched
script = "import os; print('ENV', dict(os.environ))"
name = jobs.create({"train.py": script}, "exec python train.py")
print("STATUS", jobs.wait(name)["TrainingJobStatus"])
print("SECRETS", sum("hunter2" in line for line in jobs.log(name)))
import boto3
try:
    boto3.client("s3", endpoint_url="http://198.51.100.1:9").list_buckets()
except Exception as error:
    print("REFUSED", error)
with local_sagemaker.start() as inner:  # it leaves the session alone
    assert inner is session
client = boto3.client("s3")
client.list_buckets()
session.stop()
try:
    client.list_buckets()  # the client still exists, but must not call AWS
except Exception as error:
    print("REFUSED", error)
print("OUTSIDE", outside)
print("ENDPOINT", os.environ["AWS_ENDPOINT_URL"], os.environ["AWS_ACCESS_KEY_ID"])
with local_sagemaker.start(largest_cluster={"ml.m5.large": 1}) as again:
    print("AGAIN", again is not session, again.scale_vcpus)
"""
    process = start_kernel(
        body,
        tmp_path,
        MY_PASSWORD="hunter2",
        AWS_ACCESS_KEY_ID="AKIAhunter2",
        AWS_SECRET_ACCESS_KEY="hunter2",
        AWS_PROFILE="hunter2",
        AWS_ENDPOINT_URL="http://198.51.100.1:9",
        SAGEMAKER_USER_CONFIG_OVERRIDE="/nonexistent/hunter2.yaml",
    )
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "STATUS Completed" in output
    assert "SECRETS 0" in output
    assert "OUTSIDE []" in output
    assert output.count("REFUSED The local SageMaker blocked a request") == 2, output
    assert "ENDPOINT http://198.51.100.1:9 AKIAhunter2" in output  # restored at the end
    assert "AGAIN True 2" in output


@pytest.mark.parametrize(
    "before, folder, words",
    [
        ("import boto3; client = boto3.client('s3', region_name='us-east-1')", "",
         "Restart the kernel, and call local_sagemaker.start() first"),
        ("", "x" * 40,
         "xxx, is too long for the sockets that hosts create in it: set TMPDIR to a path of at "
         "most 38 characters"),
    ],
    ids=["clients exist", "a long folder"],
)  # fmt: skip
def test_a_start_is_refused(tmp_path: Path, before: str, folder: str, words: str):
    (tmp_path / folder).mkdir(exist_ok=True)
    environment = {"TMPDIR": str(tmp_path / folder)} if folder else {}
    result = subprocess.run(
        [sys.executable, "-c", f"{before}\nfrom shared.local_sagemaker import start\nstart()"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert words in result.stderr.splitlines()[-1]


WATCHED_JOB = """
import json
import boto3
from helpers.jobs import READ_CONFIG, TWO_GROUPS
from shared import monitoring

script = READ_CONFIG + '''
import time
end = time.monotonic() + 4.5
while time.monotonic() < end:
    if group == "dnn_group":
        time.sleep(1)
        print("step=1 loss=1 step_time_ms=100 data_wait_ms=60 samples_per_s=1", flush=True)
'''
name = jobs.run({"train.py": script}, "exec python train.py", TWO_GROUPS)["TrainingJobName"]
monitoring.main([name])
monitoring.main([name, "--logs"])
figure = monitoring.plot_job(name)
drawn = {p.get_title("left"): [list(line.get_ydata()) for line in p.lines] for p in figure.axes}
values = {}
lines = monitoring.logs(name)
for host in ("algo-1", "algo-2"):
    points = boto3.client("cloudwatch").get_metric_statistics(
        Namespace="/aws/sagemaker/TrainingJobs", MetricName="CPUUtilization", Period=1,
        Dimensions=[{"Name": "Host", "Value": f"{name}/{host}"}],
        StartTime=lines[0].time, EndTime=lines[-1].time, Statistics=["Average"])["Datapoints"]
    values[host] = [point["Average"] for point in points]
table = monitoring.utilisation(name).to_dict("records")
print("RESULT" + json.dumps([drawn, values, table]))
"""


@thorough
def test_a_job_on_this_machine_is_seen_by_the_same_code(tmp_path):
    process = start_kernel(WATCHED_JOB, tmp_path)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    drawn, values, (data, dnn) = json.loads(output.split("RESULT")[1])
    assert (data["group"], data["instance type"]) == ("data_group", "ml.c5.9xlarge")
    assert (dnn["group"], dnn["instance type"]) == ("dnn_group", "ml.g5.2xlarge")
    for row, vcpus in ((data, 36), (dnn, 8)):
        percentages = [value / vcpus for value in values[row["host"]]]
        assert len(percentages) >= 2 and 0 <= min(percentages) <= max(percentages) <= 100.001
        shown = drawn[f"{row['group']} / {row['host']} ({row['instance type']})"][0]
        assert shown[: len(percentages)] == pytest.approx(percentages)
        assert min(percentages) <= row["CPU (%)"] <= max(percentages)
    assert data["CPU (%)"] > 2 * dnn["CPU (%)"]  # the data host is in a busy loop, the other sleeps
    waits = drawn["Step time"][1]
    assert set(waits) == {60} and len(waits) >= 3
    assert "Step time 100.0 ms, data wait 60.0 ms" in output
    assert f"== dnn_group / {dnn['host']} ({len(waits)} lines)" in output
