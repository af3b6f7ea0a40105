"""The life of one training job: download, train, upload, as DescribeTrainingJob and CloudWatch tell
it.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlparse

import boto3

from . import cluster, supervisor

LOG_GROUP = METRIC_NAMESPACE = "/aws/sagemaker/TrainingJobs"  # AWS uses one name for both
SYNC_CHECKPOINTS_SECONDS = 2.0
STATUS_MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
}


class Job(threading.Thread):
    """Runs one job in the background and keeps `record`, moto's training job, up to date.

    `record` is what DescribeTrainingJob answers with; `request` is the CreateTrainingJob request.
    """

    def __init__(self, record, request: dict, region: str, scale_vcpus: int):
        super().__init__(name=f"local-sagemaker-{request['TrainingJobName']}", daemon=True)
        self.name_, self.record, self.request, self.region = (
            request["TrainingJobName"],
            record,
            request,
            region,
        )
        groups = cluster.instance_groups(request["ResourceConfig"])
        self.number, self.lock = cluster.lock_job_number()
        self.folder = Path(tempfile.mkdtemp(prefix="local-sagemaker-"))
        self.hosts = cluster.plan_hosts(groups, scale_vcpus, self.number, self.folder)
        self.supervisor: subprocess.Popen | None = None
        self.stop_asked = threading.Event()
        # Made in the thread that creates the job: boto3's default session is not thread-safe.
        self.s3 = boto3.client("s3", region_name=region)
        self.logs = boto3.client("logs", region_name=region)
        self.cloudwatch = boto3.client("cloudwatch", region_name=region)
        self.synced: dict[tuple[str, str], tuple] = {}

        definitions = request["AlgorithmSpecification"].get("MetricDefinitions") or []
        self.metrics = [(d["Name"], re.compile(d["Regex"])) for d in definitions]
        record.algorithm_specification["MetricDefinitions"] = definitions
        record.environment = request.get("Environment") or {}
        record.retry_strategy = request.get("RetryStrategy")
        record.training_job_status = "InProgress"
        record.model_artifacts = record.training_end_time = record.training_start_time = None
        record.secondary_status_transitions, record.final_metric_data_list = [], []
        self.enter("Starting")

    # ---- what DescribeTrainingJob tells ----

    def enter(self, status: str, message: str | None = None) -> None:
        """Moves the job to a secondary status."""
        now, transitions = datetime.now(timezone.utc), self.record.secondary_status_transitions
        if transitions:
            transitions[-1]["EndTime"] = now
        message = message or STATUS_MESSAGES[status]
        transitions.append({"Status": status, "StartTime": now, "StatusMessage": message})
        self.record.secondary_status, self.record.last_modified_time = status, now

    def finish(self, status: str, secondary: str, reason: str | None = None) -> None:
        """Ends the job; the status changes last, when all that a reader may look at is there."""
        record = self.record
        record.training_end_time = datetime.now(timezone.utc)
        if record.training_start_time:
            seconds = (record.training_end_time - record.training_start_time).total_seconds()
            record.training_time_in_seconds = record.billable_time_in_seconds = max(
                1, round(seconds)
            )
        record.failure_reason = reason[:1024] if reason else None
        self.enter(secondary, STATUS_MESSAGES[secondary] if not reason else None)
        record.secondary_status_transitions[-1]["EndTime"] = record.training_end_time
        record.training_job_status = status

    def stop(self) -> None:
        """StopTrainingJob."""
        self.record.training_job_status = "Stopping"
        self.enter("Stopping")
        self.stop_asked.set()
        self._tell_supervisor(b"stop\n")

    def abandon(self) -> None:
        """Kills every host now and waits until nothing is left."""
        self.stop_asked.set()
        if self.supervisor is not None:
            self.supervisor.stdin.close()
        self.join()

    # ---- the job itself ----

    def run(self) -> None:
        """Downloads, trains and uploads; whatever goes wrong ends the job with a reason."""
        try:
            self._run()
        except Exception as error:  # a thread has nobody above it: the job carries the message
            traceback.print_exc()
            self.finish("Failed", "Failed", f"InternalServerError: local SageMaker: {error}")
        finally:
            if self.supervisor is not None:
                if not self.supervisor.stdin.closed:
                    self.supervisor.stdin.close()
                self.supervisor.wait()
            for host in self.hosts:
                supervisor.kill_container(str(host.opt_ml))  # had the supervisor itself been killed
            shutil.rmtree(self.folder, ignore_errors=True)
            self.lock.close()

    def _run(self) -> None:
        self.record.training_start_time = datetime.now(timezone.utc)
        self.enter("Downloading")
        for host in self.hosts:
            cluster.write_configuration(host, self.hosts, self.request)
        try:
            self._download()
        except FileNotFoundError as error:
            return self.finish("Failed", "Failed", f"ClientError: Data download failed: {error}")
        if self.stop_asked.is_set():
            return self.finish("Stopped", "Stopped")
        self.enter("Training")
        self._start_supervisor()
        end = self._follow()
        if self.stop_asked.is_set() and end["end"] != "stopped":
            end = {**end, "end": "stopped" if end["end"] == "completed" else end["end"]}
        self._sync_checkpoints()
        if end["end"] == "failed":
            return self.finish("Failed", "Failed", self._failure_reason(end))
        self.enter("Uploading")
        self._upload()
        if end["end"] == "max_runtime_exceeded":
            self.finish("Stopped", "MaxRuntimeExceeded")
        elif end["end"] == "stopped":
            self.finish("Stopped", "Stopped")
        else:
            self.finish("Completed", "Completed")

    def _download(self) -> None:
        for host in self.hosts:
            for channel in cluster.channels_of(host, self.request):
                target = host.opt_ml / "input" / "data" / channel["ChannelName"]
                self._copy_from_s3(channel["DataSource"]["S3DataSource"]["S3Uri"], target)
                if channel["ChannelName"] == "sm_drivers":
                    for path in filter(Path.is_file, target.rglob("*")):
                        if b"\0" not in path.read_bytes():  # not a compiled file
                            path.write_text(cluster.rewrite(path.read_text(), host))
            if checkpoints := self.request.get("CheckpointConfig"):
                target = self._checkpoint_folder(host)
                target.mkdir(parents=True, exist_ok=True)
                self._copy_from_s3(checkpoints["S3Uri"], target, may_be_empty=True)

    def _copy_from_s3(self, uri: str, target: Path, may_be_empty: bool = False) -> None:
        """Copies all objects under the prefix `uri`, named as SageMaker names them."""
        bucket, prefix = urlparse(uri).netloc, urlparse(uri).path.lstrip("/")
        found = False
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for item in (item for page in pages for item in page.get("Contents", [])):
            name = item["Key"].removeprefix(prefix).lstrip("/") or Path(prefix).name
            if item["Key"].endswith("/"):
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.s3.download_file(bucket, item["Key"], str(target / name))
            found = True
        if not found and not may_be_empty:
            raise FileNotFoundError(
                f'No S3 objects found under S3 URL "{uri}" given in input data source. Please '
                "ensure that the bucket exists and that objects exist under that S3 prefix."
            )

    def _start_supervisor(self) -> None:
        specification = self.request["AlgorithmSpecification"]
        command = specification["ContainerEntrypoint"] + specification.get("ContainerArguments", [])
        plan = {
            "folder": str(self.folder),
            "max_runtime_seconds": self.request["StoppingCondition"]["MaxRuntimeInSeconds"],
            "supervisor_cores": sorted(os.sched_getaffinity(0)),
            "hosts": [
                {
                    "name": host.name,
                    "base_dir": str(host.opt_ml),
                    "tree": str(host.tree),
                    "cores": host.cores,
                    "vcpus": cluster.vcpus(host.instance_type),
                    "command": [cluster.rewrite(argument, host) for argument in command],
                    "environment": cluster.host_environment(
                        host, self.hosts, self.request, self.number, self.record.arn, self.region
                    ),
                }
                for host in self.hosts
            ],
        }
        self.supervisor = subprocess.Popen(
            [sys.executable, supervisor.__file__],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the kernel's terminal is not for the job
        )
        self._tell_supervisor(json.dumps(plan).encode() + b"\n")
        if self.stop_asked.is_set():
            self._tell_supervisor(b"stop\n")

    def _tell_supervisor(self, line: bytes) -> None:
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.stdin.write(line)

    def _follow(self) -> dict:
        """Passes the hosts' output and CPU use on to CloudWatch until the job ends; returns the end
        event.
        """
        started, streams = int(time.time()), {}
        for host in self.hosts:
            streams[host.name] = f"{self.name_}/{host.name}-{started}"
            self.logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=streams[host.name])
        next_sync = time.monotonic() + SYNC_CHECKPOINTS_SECONDS
        for batch in self._event_batches():
            for host in self.hosts:
                lines = [e for e in batch if e.get("host") == host.name and "log" in e]
                self._put_logs(streams[host.name], lines)
            self._put_metrics(batch)
            if batch and "end" in batch[-1]:
                return batch[-1]
            if time.monotonic() > next_sync:
                self._sync_checkpoints()
                next_sync = time.monotonic() + SYNC_CHECKPOINTS_SECONDS
        raise AssertionError("the stream of events ends with an end event or an exception")

    def _event_batches(self) -> Iterator[list[dict]]:
        """The supervisor's events as they come, a few times a second."""
        path, unread = self.folder / "events.jsonl", b""
        while not path.exists() and self.supervisor.poll() is None:
            time.sleep(0.02)
        with open(path, "rb") as file:
            while True:
                alive = self.supervisor.poll() is None
                *lines, unread = (unread + file.read()).split(b"\n")
                yield [json.loads(line) for line in lines]
                if not alive:
                    raise RuntimeError("the process that runs the hosts was killed")
                time.sleep(0.2)

    def _put_logs(self, stream: str, events: list[dict]) -> None:
        for start in range(0, len(events), 1000):  # AWS takes 10,000 events or 1 MB a call
            messages = [
                {"timestamp": int(e["time"] * 1000), "message": e["log"] or " "}
                for e in events[start : start + 1000]
            ]
            self.logs.put_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, logEvents=messages
            )

    def _put_metrics(self, events: list[dict]) -> None:
        data = []
        for event in events:
            when = datetime.fromtimestamp(event["time"], timezone.utc)
            if "cpu_utilization" in event:
                dimensions = [{"Name": "Host", "Value": f"{self.name_}/{event['host']}"}]
                data.append(("CPUUtilization", dimensions, when, event["cpu_utilization"]))
            for name, regex in self.metrics:
                if match := regex.search(event.get("log", "")):
                    dimensions = [{"Name": "TrainingJobName", "Value": self.name_}]
                    data.append((name, dimensions, when, float(match.group(1))))
        for name, dimensions, when, value in data:
            self.cloudwatch.put_metric_data(
                Namespace=METRIC_NAMESPACE,
                MetricData=[
                    {
                        "MetricName": name,
                        "Dimensions": dimensions,
                        "Timestamp": when,
                        "Value": value,
                    }
                ],
            )
            if name != "CPUUtilization":
                final = {m["MetricName"]: m for m in self.record.final_metric_data_list}
                final[name] = {"MetricName": name, "Value": value, "Timestamp": when}
                self.record.final_metric_data_list = list(final.values())

    def _failure_reason(self, end: dict) -> str:
        host = next(h for h in self.hosts if h.name == end["failed_host"])
        failure = host.opt_ml / "output" / "failure"
        text = failure.read_text(errors="replace").strip() if failure.exists() else ""
        return f"AlgorithmError: {text}, exit code: {end['exit_code']}"

    def _checkpoint_folder(self, host: cluster.Host) -> Path:
        """Where the host's checkpoints are: LocalPath, by default /opt/ml/checkpoints."""
        path = self.request["CheckpointConfig"].get("LocalPath", "/opt/ml/checkpoints")
        return Path(cluster.rewrite(path, host))

    def _sync_checkpoints(self) -> None:
        """Copies new and changed checkpoint files of every host to S3."""
        if not self.request.get("CheckpointConfig"):
            return
        uri = urlparse(self.request["CheckpointConfig"]["S3Uri"])
        for host in self.hosts:
            folder = self._checkpoint_folder(host)
            for path in filter(Path.is_file, sorted(folder.rglob("*"))):
                try:
                    state = (path.stat().st_mtime_ns, path.stat().st_size)
                    name = str(path.relative_to(folder))
                    if self.synced.get((host.name, name)) == state:
                        continue
                    key = f"{uri.path.strip('/')}/{name}"
                    self.s3.upload_file(str(path), uri.netloc, key)
                except FileNotFoundError:
                    continue  # replaced while we looked: the next round has it
                self.synced[host.name, name] = state

    def _upload(self) -> None:
        """Puts model.tar.gz and output.tar.gz where AWS puts them."""
        output = self.request["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        model_uri = f"{output}/{self.name_}/output/model.tar.gz"
        for folder, uri in (
            ("model", model_uri),
            ("output/data", f"{output}/{self.name_}/output/output.tar.gz"),
        ):
            files = {}
            for host in self.hosts:
                root = host.opt_ml / folder
                for path in filter(Path.is_file, root.rglob("*")):
                    files.setdefault(str(path.relative_to(root)), path)
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w:gz") as tar:
                for name, path in sorted(files.items()):
                    tar.add(path, name)
            parsed = urlparse(uri)
            self.s3.put_object(
                Bucket=parsed.netloc, Key=parsed.path.lstrip("/"), Body=archive.getvalue()
            )
        self.record.model_artifacts = {"S3ModelArtifacts": model_uri}
