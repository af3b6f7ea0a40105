"""The session in which this process's AWS is this machine: moto, completed by training jobs."""

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
# A socket's name may have 107 characters. Python's own, for worker processes and shared memory, are
# in a host's temporary folder.
SOCKET = "/local-sagemaker-12345678/algo-10/tmp/pymp-12345678/listener-12345678"
LONGEST_TMPDIR = 107 - len(SOCKET)
_active: "LocalSageMaker | None" = None


class LocalSageMaker:
    """What `start()` gives: `role` is the ARN of an execution role; `stop()` ends all of it."""

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
            self.started_again -= 1  # a session that was there before the block goes on after it
        else:
            self.stop()

    def cores(self, instance_type: str) -> int:
        """How many of this machine's cores an instance gets; on AWS it has its type's vCPUs.

        Raises ValueError before the largest cluster is known, and for an unknown type.
        """
        if not self.scale_vcpus:
            raise ValueError("Name the largest cluster first: local_sagemaker.start({type: count})")
        return cluster.share_of_cores(instance_type, self.scale_vcpus)

    def stop(self) -> None:
        """Kill the jobs that still run and end the session; clients made in it stay unusable."""
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
            session.unregister("before-send", botocore_stubber)  # else it would answer twice
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
            del backend.training_jobs[name]  # which moto has as Completed
            raise
        print(cluster.describe_plan(name, job.hosts))
        channels = request.get("InputDataConfig") or []
        fast = [c["ChannelName"] for c in channels if cluster.input_mode(c, request) == "FastFile"]
        if fast:
            print(
                f"FastFile of {', '.join(fast)}: here it is downloaded before the job starts, as "
                "by File; on AWS files are read from S3 when they are used, and are read-only."
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
    """Make this process's AWS this machine, until `stop()` or the end of the process.

    largest_cluster: instances by type of the largest cluster that will run, for example
    {"ml.c5.9xlarge": 1, "ml.g5.2xlarge": 1}. It fixes how many cores an instance gets, so that
    jobs of different size can be compared; without it the first job stands for the whole machine.
    images: the folder of the Python environment that stands for a training image, by the image's
    URI; default: this process's own environment.
    container: a program that runs the command after it as a container would, with /opt/ml in its
    place; default: the hosts are processes like others. tests/containers/container.py is one.

    Called again in the same process it returns the session that runs, whose images and container
    stay. Raises RuntimeError where AWS clients exist already (they would still reach AWS), where
    another largest cluster is asked for after jobs have run, where the name of the folder for
    temporary files is too long, and on systems other than Linux; ValueError for an unknown instance
    type, and for an image whose environment has no Python.
    """
    global _active
    for image, environment in images.items():
        if not Path(environment, "bin", "python").exists():
            raise ValueError(f"The environment for {image}, {environment}, has no bin/python.")
    if _active is not None:
        scale_vcpus = _vcpus_of(largest_cluster) or _active.scale_vcpus
        if _active.jobs and scale_vcpus != _active.scale_vcpus:
            raise RuntimeError(
                "Jobs have run on another scale than this largest cluster's, so later ones could "
                "not be compared with them. Restart the kernel to change it."
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
            f"The folder for temporary files, {folder}, has too long a name for sockets in the "
            f"hosts' own: set TMPDIR to one of at most {LONGEST_TMPDIR} characters, such as /tmp."
        )
    guarded = BotocoreStubber.__call__ is _answer_or_refuse  # by an earlier session
    clients = [] if guarded else _instances(botocore.client.BaseClient)
    if clients:
        raise RuntimeError(
            f"This process already has AWS clients ({clients[0].meta.service_model.service_name}, "
            "...), which would still reach AWS. Restart the kernel and start the local SageMaker "
            "first."
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
    """All objects of a class in this process. (isinstance would trip over dead weak references.)"""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


_moto_answer = BotocoreStubber.__call__


def _answer_or_refuse(stubber: BotocoreStubber, event_name: str, request, **kwargs):
    """moto's answer to a request; where it has none, botocore would go on to the network."""
    answer = _moto_answer(stubber, event_name, request, **kwargs)
    if answer is None:
        raise RuntimeError(
            f"The local SageMaker let no request out to {request.url.split('?')[0]}: either "
            "nothing on this "
            "machine answers it, or its session has ended. Restart the kernel to use AWS."
        )
    return answer


def allow_everything(response: IamResponse) -> ActionResult:
    """Answer SimulatePrincipalPolicy, which the SDK asks before it accepts a role."""
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
