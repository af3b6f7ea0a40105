"""One training job, from its start to its end, as DescribeTrainingJob and CloudWatch show it."""

import contextlib
import json
import math
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

import boto3
from botocore.exceptions import ClientError
from moto.core.utils import utcnow
from moto.logs.models import logs_backends

from . import cluster, supervisor
from .refusals import DEFAULT_MAX_RUNTIME

LOG_GROUP = METRIC_NAMESPACE = "/aws/sagemaker/TrainingJobs"  # AWS uses one name for both
SYNC_CHECKPOINTS_SECONDS = 2.0
LONGEST_REASON = 1024
MOST_READ = 4 << 20  # bytes of events read at once: a host may print faster than we forward
STATUS_MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Completed": "Training job completed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
}


class JobFailed(Exception):
    """Raised to end the job; the message becomes its FailureReason."""


class Job(threading.Thread):
    """Run one job in the background, and keep `record`, which DescribeTrainingJob returns.

    `python` (the interpreter's folder) and `container` replace the image: see `session.start`.
    """

    def __init__(self, record, request: dict, scale: int, python: Path, container: list):
        self.job_name = request["TrainingJobName"]
        super().__init__(name=f"local-sagemaker-{self.job_name}", daemon=True)
        self.record, self.request = record, request
        self.region, account = record.arn.split(":")[3:5]
        self.output = request["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        checkpoints = request.get("CheckpointConfig", {})
        # With a slash, since run1 is also a prefix of run10/step.txt.
        self.checkpoints = checkpoints.get("S3Uri", "").rstrip("/") + "/"
        self.checkpoint_folder = checkpoints.get("LocalPath", "/opt/ml/checkpoints").lstrip("/")
        self.python, self.container = python, container
        definitions = request["AlgorithmSpecification"].get("MetricDefinitions", [])
        self.metrics = [(d["Name"], re.compile(d["Regex"])) for d in definitions]
        record.algorithm_specification["MetricDefinitions"] = definitions
        record.environment = request.get("Environment", {})
        record.training_job_status = "InProgress"
        record.secondary_status_transitions, record.final_metric_data_list = [], []
        late = "model_artifacts", "training_start_time", "training_end_time", "failure_reason"
        late += "training_time_in_seconds", "billable_time_in_seconds"
        vars(record).update(dict.fromkeys(late))  # since describe calls iterate over them
        self.enter("Starting")
        # Guards the status and the pipe to the supervisor, which the user's thread uses as well.
        self.guard = threading.RLock()
        self.stop_asked = self.abandoned = self.planned = False
        # Created in the user's thread: boto3's default session is not thread-safe.
        self.s3 = boto3.client("s3", region_name=self.region)
        # The backend, not a client, which takes longer for a line than a host takes to print it.
        self.logs = logs_backends[account][self.region]
        if LOG_GROUP not in self.logs.groups:
            self.logs.create_log_group(LOG_GROUP, {})
        self.cloudwatch = boto3.client("cloudwatch", region_name=self.region)
        self.synced: dict[Path, tuple] = {}
        self.number, self.lock = cluster.lock_job_number()
        self.folder = Path(tempfile.mkdtemp(prefix="local-sagemaker-"))
        groups = cluster.instance_groups(request["ResourceConfig"])
        self.hosts = cluster.plan_hosts(groups, scale, self.number, self.folder)
        # What each host is told, with the host's own paths if there is no container.
        text = json.dumps(request, ensure_ascii=False)
        self.told = {
            host.name: request if container else json.loads(cluster.own_paths(text, host, request))
            for host in self.hosts
        }
        (self.folder / "events.jsonl").touch()
        # From here on, the supervisor removes the folder when this process ends, even in a crash.
        self.supervisor = subprocess.Popen(
            [sys.executable, supervisor.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the kernel's terminal must not reach the job
        )

    def stop(self) -> bool:
        """Stop the job, as StopTrainingJob does; return False if it has already ended."""
        with self.guard:
            if self.record.training_job_status == "InProgress":
                self.record.training_job_status, self.stop_asked = "Stopping", True
                self.enter("Stopping")
                if self.planned:
                    self.tell_supervisor("stop")
            return self.record.training_job_status == "Stopping"

    def abandon(self) -> None:
        """Kill every host now and wait until nothing is left."""
        with self.guard:
            self.abandoned = True
            self.tell_supervisor("quit")
        self.join()

    def tell_supervisor(self, line: str) -> None:
        """Send a line to the supervisor; if the supervisor has ended, `_follow` notices it."""
        with self.guard, contextlib.suppress(BrokenPipeError, ValueError):
            self.supervisor.stdin.write(line.encode() + b"\n")

    def enter(self, status: str, message: str = "") -> None:
        """Move the job to a secondary status."""
        now, transitions = utcnow(), self.record.secondary_status_transitions
        if transitions:
            transitions[-1]["EndTime"] = now
        message = message or STATUS_MESSAGES[status]
        transitions.append({"Status": status, "StartTime": now, "StatusMessage": message})
        self.record.secondary_status, self.record.last_modified_time = status, now

    def finish(self, status: str, secondary: str, reason: str = "") -> None:
        """End the job; set the status last, so that readers who see it find the rest complete."""
        record = self.record
        with self.guard:
            record.training_end_time = end = utcnow()
            seconds = max(1, round((end - record.training_start_time).total_seconds()))
            record.training_time_in_seconds = record.billable_time_in_seconds = seconds
            record.failure_reason = reason[:LONGEST_REASON] or None
            self.enter(secondary, reason[:LONGEST_REASON])
            record.secondary_status_transitions[-1]["EndTime"] = end
            record.training_job_status = status

    def run(self) -> None:
        """Download, train and upload; any error ends the job with a failure reason."""
        self.record.training_start_time = utcnow()
        try:
            self.finish(*self._run())
        except JobFailed as error:
            self.finish("Failed", "Failed", str(error))
        except Exception as error:  # nobody would catch it in a thread: the job has the message
            if self.abandoned:
                self.finish("Stopped", "Stopped")
            else:
                traceback.print_exc()
                self.finish("Failed", "Failed", f"InternalServerError: local SageMaker: {error}")
        finally:
            self.tell_supervisor("quit")
            self.supervisor.communicate()
            for host in self.hosts:
                supervisor.kill_host(str(host.opt_ml))  # in case the supervisor was killed
            shutil.rmtree(self.folder, ignore_errors=True)
            self.lock.close()

    def _run(self) -> tuple[str, str]:
        """Run the job; return the status and the secondary status that it ends with."""
        self.enter("Downloading")
        for host in self.hosts:
            cluster.write_configuration(host, self.hosts, self.told[host.name], self.python)
        try:
            self.s3.head_bucket(Bucket=cluster.bucket_and_key(self.output)[0])
        except ClientError as error:
            raise JobFailed(f"ClientError: S3OutputPath has no bucket: {error}") from error
        try:
            self._download()
        except (ClientError, FileExistsError, NotADirectoryError) as error:
            raise JobFailed(f"ClientError: Data download failed: {error}") from error
        with self.guard:
            if self.stop_asked:
                return "Stopped", "Stopped"
            self.enter("Training")
            condition = self.request.get("StoppingCondition", {})
            limit = condition.get("MaxRuntimeInSeconds", DEFAULT_MAX_RUNTIME)
            hosts = [self._host_plan(host, self.told[host.name]) for host in self.hosts]
            self.tell_supervisor(json.dumps({"max_runtime_seconds": limit, "hosts": hosts}))
            self.planned = True
        end = self._follow()
        self._sync_checkpoints()
        self.enter("Uploading")
        try:
            self._upload()  # as on AWS, a failed job does so too
        finally:
            if end["end"] == "failed":
                raise JobFailed(self._failure_reason(end))
        if end["end"] == "max_runtime_exceeded":
            return "Stopped", "MaxRuntimeExceeded"
        # A job that ends by itself while it is being stopped counts as stopped.
        return ("Stopped", "Stopped") if self.stop_asked else ("Completed", "Completed")

    def _host_plan(self, host: cluster.Host, told: dict) -> dict:
        """Return what the supervisor needs to run a host, which was told this request."""
        specification = told["AlgorithmSpecification"]
        command = specification["ContainerEntrypoint"] + specification.get("ContainerArguments", [])
        return {
            "name": host.name,
            "base_dir": str(host.opt_ml),
            "tree": str(host.tree),
            "cores": host.cores,
            "vcpus": cluster.vcpus(host.instance_type),
            "command": self.container + command,
            "environment": {
                "AWS_REGION": self.region,
                "TRAINING_JOB_ARN": self.record.arn,
                **cluster.environment(host, self.hosts, told, self.number),
            },
        }

    def _download(self) -> None:
        for host in self.hosts:
            for channel in cluster.channels_of(host, self.request):
                target = host.opt_ml / "input" / "data" / channel["ChannelName"]
                self._copy_from_s3(channel["DataSource"]["S3DataSource"]["S3Uri"], target)
                if channel["ChannelName"] == "sm_drivers" and not self.container:
                    self._adapt_drivers(target, host)
            if self.checkpoints != "/":
                target = host.tree / self.checkpoint_folder
                target.mkdir(parents=True, exist_ok=True)
                self._copy_from_s3(self.checkpoints, target)

    def _adapt_drivers(self, drivers: Path, host: cluster.Host) -> None:
        """Let the SDK's scripts find the host's own /opt/ml; refuse what they cannot do here."""
        for path in filter(Path.is_file, drivers.rglob("*")):
            if b"\0" not in path.read_bytes():  # skip binary files
                text = path.read_text(errors="surrogateescape")
                if path.name == "distributed.json" and json.loads(text) and len(self.hosts) > 1:
                    why = "names of hosts do not resolve here, so `distributed=` needs one instance"
                    raise JobFailed(f"ClientError: local SageMaker: {why}")
                text = cluster.own_paths(text, host, self.request)
                path.write_text(text, errors="surrogateescape")

    def _copy_from_s3(self, uri: str, target: Path) -> None:
        """Copy all objects under the prefix `uri`, with the file names that SageMaker uses."""
        bucket, prefix = cluster.bucket_and_key(uri)
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for key in (item["Key"] for page in pages for item in page.get("Contents", [])):
            path = target / (key.removeprefix(prefix).lstrip("/") or Path(prefix).name)
            if not path.resolve().is_relative_to(target.resolve()):
                raise JobFailed(f"ClientError: Data download failed: the key {key!r} leaves {uri}")
            if not key.endswith("/"):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.s3.download_file(bucket, key, str(path))

    def _follow(self) -> dict:
        """Forward the hosts' output and CPU use to CloudWatch; return the job's end event."""
        now = int(time.time())
        streams = {host.name: f"{self.job_name}/{host.name}-{now}" for host in self.hosts}
        for stream in streams.values():
            self.logs.create_log_stream(LOG_GROUP, stream)
        next_sync = time.monotonic() + SYNC_CHECKPOINTS_SECONDS
        for batch in self._event_batches():
            for host, stream in streams.items():
                lines = [
                    {"timestamp": int(event["time"] * 1000), "message": event["log"] or " "}
                    for event in batch
                    if event.get("host") == host and "log" in event
                ]
                if lines:
                    self.logs.put_log_events(LOG_GROUP, stream, lines)
            self._put_metrics(batch)
            if batch and "end" in batch[-1]:
                return batch[-1]
            if time.monotonic() > next_sync:
                self._sync_checkpoints()
                next_sync = time.monotonic() + SYNC_CHECKPOINTS_SECONDS
        why = self.supervisor.stderr.read().decode().splitlines() or ["it was killed"]
        raise RuntimeError(f"the process that runs the hosts ended: {why[-1]}")

    def _event_batches(self) -> Iterator[list[dict]]:
        """Yield the supervisor's new events a few times a second, until it ends."""
        alive, unread = True, b""
        with open(self.folder / "events.jsonl", "rb") as file:
            while alive:
                alive = self.supervisor.poll() is None
                data = file.read(MOST_READ)
                *lines, unread = (unread + data).split(b"\n")
                yield json.loads(b"[%b]" % b",".join(lines))
                if len(data) < MOST_READ:
                    time.sleep(0.2)

    def _put_metrics(self, events: list[dict]) -> None:
        data, final = [], {m["MetricName"]: m for m in self.record.final_metric_data_list}
        job = {"Name": "TrainingJobName", "Value": self.job_name}
        for event in events:
            if "cpu_utilization" in event:
                host = {"Name": "Host", "Value": f"{self.job_name}/{event['host']}"}
                # As in CloudWatch, a value's timestamp is the start of its period.
                value, since = event["cpu_utilization"], event["since"]
                data.append({**_metric("CPUUtilization", value, since), "Dimensions": [host]})
            for name, regex in self.metrics:
                if match := regex.search(event.get("log", "")):
                    with contextlib.suppress(TypeError, ValueError):  # it found no number
                        final[name] = _metric(name, float(match.group(1)), event["time"])
                        data.append({**final[name], "Dimensions": [job]})
        self.record.final_metric_data_list = list(final.values())
        if data:
            self.cloudwatch.put_metric_data(Namespace=METRIC_NAMESPACE, MetricData=data)

    def _failure_reason(self, end: dict) -> str:
        # AWS does not document which host's file counts. Here it is that of the host that failed
        # first, or another host's if the first one has none.
        hosts = sorted(self.hosts, key=lambda host: host.name != end["failed_host"])
        files = [host.opt_ml / "output" / "failure" for host in hosts]
        texts = [path.read_text(errors="replace").strip() for path in files if path.is_file()]
        return f"AlgorithmError: {next(filter(None, texts), '')}, exit code: {end['exit_code']}"

    def _sync_checkpoints(self) -> None:
        """Copy new and changed checkpoint files of every host to S3."""
        bucket, prefix = cluster.bucket_and_key(self.checkpoints)
        for host in self.hosts if bucket else ():
            folder = host.tree / self.checkpoint_folder
            for path in filter(Path.is_file, sorted(folder.rglob("*"))):
                with contextlib.suppress(FileNotFoundError):  # just replaced: the next sync has it
                    state = path.stat().st_mtime_ns, path.stat().st_size
                    if self.synced.get(path) != state:
                        key = f"{prefix}{path.relative_to(folder)}"
                        self.s3.upload_file(str(path), bucket, key)
                        self.synced[path] = state

    def _upload(self) -> None:
        """Upload the model and /opt/ml/output/data to where AWS puts them, compressed or not.

        Source of output.tar.gz: the SDK's ModelTrainer.output_data. AWS does not document where
        output/data is if it is not compressed.
        """
        output = f"{self.output}/{self.job_name}/output/"
        bucket, prefix = cluster.bucket_and_key(output)
        compressed = self.request["OutputDataConfig"].get("CompressionType") != "NONE"
        for folder, archive_name in (("model", "model.tar.gz"), ("output/data", "output.tar.gz")):
            files = {}
            for host in self.hosts:
                root = host.opt_ml / folder
                for path in filter(Path.is_file, root.rglob("*")):
                    files.setdefault(f"{root.name}/{path.relative_to(root)}", path)
            if compressed:
                archive = self.folder / archive_name
                with tarfile.open(archive, mode="w:gz") as tar:
                    for name, path in sorted(files.items()):
                        tar.add(path, name.partition("/")[2])
                files = {archive_name: archive}
            for name, path in files.items():
                self.s3.upload_file(str(path), bucket, prefix + name)
        model = output + ("model.tar.gz" if compressed else "model/")
        self.record.model_artifacts = {"S3ModelArtifacts": model}


def _metric(name: str, value: float, seconds: float) -> dict:
    if not math.isfinite(value):
        raise ValueError("CloudWatch takes no such value.")
    when = datetime.fromtimestamp(seconds, timezone.utc)
    return {"MetricName": name, "Value": value, "Timestamp": when}
