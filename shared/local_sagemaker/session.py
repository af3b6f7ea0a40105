"""The session in which this machine replaces AWS: moto, plus training jobs that really run."""

import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import boto3
import botocore.client
import botocore.session
import moto
from moto.core.botocore_stubber import BotocoreStubber
from moto.core.models import botocore_stubber
from moto.core.responses import ActionResult
from moto.iam.responses import IamResponse
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.responses import SageMakerResponse

from . import cluster, refusals
from .isolation import set_aside
from .job import LOG_GROUP, Job

ROLE_NAME = "LocalSageMakerRole"
OWN_PYTHON = Path(sys.executable).parent
# A socket's path can have at most 107 characters. Python creates sockets for worker processes and
# shared memory in a host's temporary folder; this is the longest path below TMPDIR.
SOCKET = "/local-sagemaker-12345678/algo-10/tmp/pymp-12345678/listener-12345678"
LONGEST_TMPDIR = 107 - len(SOCKET)
_active: "LocalSageMaker | None" = None


class LocalSageMaker:
    """The session that `start()` returns.

    `role` is the ARN of an execution role; `stop()` ends the session.
    """

    def __init__(
        self,
        largest_cluster: dict[str, int] | None,
        images: Mapping[str, str | Path] = MappingProxyType({}),
        container: Sequence[str] = (),
    ):
        self.scale_vcpus = _vcpus_of(largest_cluster)
        self.images, self.container = dict(images), list(container)
        self.jobs: dict[str, Job] = {}
        self.started_again = 0
        self.role = ""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "LocalSageMaker":
        return self

    def __exit__(self, *error: object) -> None:
        if self.started_again:
            self.started_again -= 1  # the session existed before the block, so it continues
        else:
            self.stop()

    def cores(self, instance_type: str) -> int:
        """Return how many of this machine's cores stand for an instance's vCPUs.

        Raises ValueError if the largest cluster is not known yet, or if the type is unknown.
        """
        if not self.scale_vcpus:
            raise ValueError("Name the largest cluster first: local_sagemaker.start({type: count})")
        return cluster.share_of_cores(instance_type, self.scale_vcpus)

    def stop(self) -> None:
        """Kill the jobs that still run and end the session; its clients do not work any more."""
        global _active
        for job in self.jobs.values():
            job.abandon()
        self._undo.close()
        _active = None

    def _start(self) -> None:
        self._undo.enter_context(set_aside())
        # Never undone: a client that outlives the session must not reach AWS.
        BotocoreStubber.__call__ = _answer_or_refuse
        for session in _instances(botocore.session.Session):
            session.unregister("before-send", botocore_stubber)  # otherwise it answers twice
            session.register("before-send", botocore_stubber)
        self._undo.enter_context(moto.mock_aws())
        create = SageMakerResponse.create_training_job
        for owner, name, method in (
            (SageMakerResponse, "create_training_job", lambda r: self._create(r, create)),
            (SageMakerResponse, "stop_training_job", lambda r: self._stop(r)),
            (IamResponse, "simulate_principal_policy", allow_everything),
        ):
            self._undo.enter_context(mock.patch.object(owner, name, method, create=True))
        self.role = create_role()
        boto3.client("logs").create_log_group(logGroupName=LOG_GROUP)

    def _create(self, response: SageMakerResponse, create: Callable) -> ActionResult:
        request = json.loads(response.body)
        name, backend = request["TrainingJobName"], response.sagemaker_backend
        existing = backend.training_jobs.get(name)
        refusals.check(request, existing.arn if existing else None)
        vcpus = cluster.total_vcpus(cluster.instance_groups(request["ResourceConfig"]))
        if vcpus > self.scale_vcpus:
            if self.scale_vcpus:
                print(
                    f"{name} has more vCPUs ({vcpus}) than earlier jobs ({self.scale_vcpus}): its "
                    "times cannot be compared with theirs. To compare, name the largest cluster at "
                    'the start: local_sagemaker.start(largest_cluster={"ml.c5.9xlarge": 1, ...}).'
                )
            self.scale_vcpus = vcpus
        result = create(response)
        try:
            image = request["AlgorithmSpecification"].get("TrainingImage")
            python = Path(self.images[image], "bin") if image in self.images else OWN_PYTHON
            job = Job(
                backend.training_jobs[name],
                request,
                response.region,
                self.scale_vcpus,
                python,
                self.container,
            )
        except BaseException:
            del backend.training_jobs[name]  # moto has recorded it as Completed
            raise
        print(cluster.describe_plan(name, job.hosts))
        channels = request.get("InputDataConfig") or []
        fast = [c["ChannelName"] for c in channels if cluster.input_mode(c, request) == "FastFile"]
        if fast:
            print(
                f"FastFile channels ({', '.join(fast)}): here, files are downloaded before the job "
                "starts, as in File mode. On AWS, they are read from S3 when they are used, and "
                "are read-only."
            )
        self.jobs[name] = job
        job.start()
        return result

    def _stop(self, response: SageMakerResponse) -> ActionResult:
        name = json.loads(response.body)["TrainingJobName"]
        if name not in self.jobs:
            raise ValidationError(f"Requested resource not found: no training job {name!r}.")
        job = self.jobs[name]
        if not job.stop():
            raise ValidationError(
                "The request was rejected because the training job is in status "
                f"{job.record.training_job_status}."
            )
        return ActionResult({})


def start(
    largest_cluster: dict[str, int] | None = None,
    images: Mapping[str, str | Path] = MappingProxyType({}),
    container: Sequence[str] = (),
) -> LocalSageMaker:
    """Replace AWS with this machine in this process, until `stop()` or the end of the process.

    If a session runs already, this returns it, with its images and container unchanged.

    Args:
        largest_cluster: The largest cluster that will run, as counts of instances by type, such as
            {"ml.c5.9xlarge": 1, "ml.g5.2xlarge": 1}. It determines how many cores an instance gets,
            so that jobs of different sizes can be compared. By default, the first job gets the
            whole machine.
        images: The folder of the Python environment that replaces a training image, by the image's
            URI. By default, this process's own environment.
        container: A command that runs another command, given as its arguments, as a container
            does, with its own /opt/ml; tests/containers/container.py is one. By default, hosts are
            ordinary processes.

    Raises:
        RuntimeError: AWS clients already exist (they would still reach AWS), jobs have run with
            another largest cluster, the path of the temporary folder is too long, or the system
            is not Linux.
        ValueError: an instance type is unknown, or an image's environment has no Python.
    """
    global _active
    for image, environment in images.items():
        if not Path(environment, "bin", "python").exists():
            raise ValueError(f"The environment for {image}, {environment}, has no bin/python.")
    if _active is not None:
        scale_vcpus = _vcpus_of(largest_cluster) or _active.scale_vcpus
        if _active.jobs and scale_vcpus != _active.scale_vcpus:
            raise RuntimeError(
                "Jobs have already run with another largest cluster, so later jobs could not be "
                "compared with them. Restart the kernel to change the largest cluster."
            )
        _active.scale_vcpus = scale_vcpus
        _active.started_again += 1
        return _active
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            "The local SageMaker needs Linux (127.x addresses, CPU affinity): "
            "use Linux, WSL, or a container."
        )
    if len(folder := tempfile.gettempdir()) > LONGEST_TMPDIR:
        raise RuntimeError(
            f"The path of the temporary folder, {folder}, is too long for the sockets that hosts "
            f"create below it: set TMPDIR to a path of at most {LONGEST_TMPDIR} characters, such "
            "as /tmp."
        )
    guarded = BotocoreStubber.__call__ is _answer_or_refuse  # an earlier session set this
    clients = [] if guarded else _instances(botocore.client.BaseClient)
    if clients:
        raise RuntimeError(
            f"This process already has AWS clients ({clients[0].meta.service_model.service_name}, "
            "...), which would still reach AWS. Restart the kernel, and call "
            "local_sagemaker.start() first."
        )
    session = LocalSageMaker(largest_cluster, images, container)
    try:
        session._start()
    except BaseException:
        session.stop()
        raise
    _active = session
    return session


def _vcpus_of(instances: dict[str, int] | None) -> int:
    groups = [{"InstanceType": t, "InstanceCount": n} for t, n in (instances or {}).items()]
    return cluster.total_vcpus(groups)


def _instances(kind: type) -> list:
    """Return all objects of a class in this process."""
    gc.collect()
    # Not isinstance: it raises ReferenceError for a weakref.proxy whose object is gone.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


_moto_answer = BotocoreStubber.__call__


def _answer_or_refuse(stubber: BotocoreStubber, event_name: str, request, **kwargs):
    """Return moto's answer to a request; raise if it has none, so that nothing reaches AWS."""
    answer = _moto_answer(stubber, event_name, request, **kwargs)
    if answer is None:
        raise RuntimeError(
            f"The local SageMaker blocked a request to {request.url.split('?')[0]}: either "
            "nothing on this machine answers it, or the session has ended. Restart the kernel to "
            "use AWS."
        )
    return answer


def allow_everything(response: IamResponse) -> ActionResult:
    """Answer SimulatePrincipalPolicy, which the SDK calls to check a role."""
    actions = response._get_param("ActionNames")
    results = [{"EvalActionName": action, "EvalDecision": "allowed"} for action in actions]
    return ActionResult({"EvaluationResults": results, "IsTruncated": False})


def create_role() -> str:
    """Create an execution role that SageMaker may assume; return its ARN."""
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "sagemaker.amazonaws.com"},
                "Action": "sts:AssumeRole",
            }
        ],
    }
    iam = boto3.client("iam")
    role = iam.create_role(RoleName=ROLE_NAME, AssumeRolePolicyDocument=json.dumps(trust))
    return role["Role"]["Arn"]
