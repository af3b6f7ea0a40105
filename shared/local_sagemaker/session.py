"""The session in which this machine replaces AWS: moto, plus training jobs that really run."""

import contextlib
import gc
import json
import operator
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from unittest import mock

import boto3
import botocore.client
import botocore.session
import moto
from moto.core.botocore_stubber import BotocoreStubber
from moto.core.exceptions import ServiceException
from moto.core.models import botocore_stubber
from moto.core.responses import ActionResult
from moto.core.utils import get_service_model
from moto.iam.responses import IamResponse
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeTrainingJob
from moto.sagemaker.responses import SageMakerResponse

from . import api_model, cluster, refusals
from .isolation import set_aside
from .job import Job

ROLE_NAME = "LocalSageMakerRole"
# A socket's path can have at most 107 characters. Python creates sockets for worker processes and
# shared memory in a host's temporary folder; this is the longest path below TMPDIR.
SOCKET = "/local-sagemaker-12345678/algo-10/tmp/pymp-12345678/listener-12345678"
LONGEST_TMPDIR = 107 - len(SOCKET)
_active: "LocalSageMaker | None" = None


class LocalSageMaker(contextlib.AbstractContextManager):
    """The session that `start()` returns; `role` is the ARN of an execution role."""

    def __init__(self, largest_cluster: dict[str, int] | None, images=None, container=()):
        self.scale_vcpus = cluster.total_vcpus((largest_cluster or {}).items())
        self.images, self.container = dict(images or {}), list(container)
        self.jobs: dict[str, Job] = {}  # by their ARNs
        self.started_again = 0
        self.role = ""
        self._answering = threading.Lock()  # moto knows a job before `jobs` has it
        self._undo = contextlib.ExitStack()

    def __exit__(self, *error: object) -> None:
        if self.started_again:
            self.started_again -= 1  # the session existed before the block, so it continues
        else:
            self.stop()

    def cores(self, instance_type: str) -> int:
        """Return how many of this machine's cores stand for an instance; ValueError if unknown."""
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
        IamResponse.simulate_principal_policy = allow_everything  # moto has no such call
        for session in _instances(botocore.session.Session):
            session.unregister("before-send", botocore_stubber)  # otherwise it answers twice
            session.register("before-send", botocore_stubber)
        self._undo.enter_context(moto.mock_aws())
        answer = mock.patch.object(SageMakerResponse, "call_action", lambda one: self._answer(one))
        self._undo.enter_context(answer)
        role = boto3.client("iam").create_role(RoleName=ROLE_NAME, AssumeRolePolicyDocument="{}")
        self.role = role["Role"]["Arn"]

    def _answer(self, response: SageMakerResponse) -> tuple:
        """Answer a request to SageMaker, with an error if AWS, or this machine, refuses it."""
        name, request = response._get_action(), json.loads(response.body)
        answers = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": lambda *asked: find_job(*asked).response_object,
            "StopTrainingJob": self._stop,
            "ListTrainingJobs": list_jobs,
            "ListTags": lambda *asked: {"Tags": find_job(*asked).tags},
        }
        try:
            if name not in answers:
                known = ", ".join(answers)
                raise ValidationError(f"The local SageMaker does not do {name}. It does {known}.")
            api_model.check(get_service_model("sagemaker").operation_model(name), request)
            with self._answering:
                result = answers[name](response, request)
        except ServiceException as error:
            result = error
        status, headers, body = response.serialized(ActionResult(result))
        return status, *response._enrich_response(headers, body)

    def _create(self, response: SageMakerResponse, request: dict) -> dict:
        name, records = request["TrainingJobName"], response.sagemaker_backend.training_jobs
        refusals.check(request, records.get(name))
        groups = cluster.instance_groups(request["ResourceConfig"])
        vcpus = cluster.total_vcpus((g["InstanceType"], g["InstanceCount"]) for g in groups)
        scale = max(self.scale_vcpus, vcpus)
        response.create_training_job()
        try:
            image = request["AlgorithmSpecification"].get("TrainingImage")
            python = Path(self.images.get(image, sys.prefix), "bin")
            job = Job(records[name], request, scale, python, self.container)
        except BaseException:
            del records[name]  # moto has recorded it as Completed
            raise
        if self.scale_vcpus not in (0, scale):
            print(
                f"{name} has more vCPUs ({scale}) than earlier jobs ({self.scale_vcpus}): its "
                "times cannot be compared with theirs. To compare, name the largest cluster at "
                'the start: local_sagemaker.start(largest_cluster={"ml.c5.9xlarge": 1, ...}).'
            )
        self.scale_vcpus = scale
        print(cluster.describe_plan(name, job.hosts))
        default = request["AlgorithmSpecification"]["TrainingInputMode"]
        modes = [each.get("InputMode", default) for each in request.get("InputDataConfig", [])]
        if "FastFile" in modes:
            print("FastFile: here, files are downloaded first; AWS reads them when used, read-only")
        self.jobs[job.record.arn] = job
        job.start()
        return {"TrainingJobArn": job.record.arn}

    def _stop(self, response: SageMakerResponse, request: dict) -> dict:
        record = find_job(response, request)
        if not self.jobs[record.arn].stop():
            status = record.training_job_status
            why = f"The request was rejected because the training job is in status {status}."
            raise ValidationError(why)
        return {}


def start(
    largest_cluster: dict[str, int] | None = None,
    images: Mapping[str, str | Path] | None = None,
    container: Sequence[str] = (),
) -> LocalSageMaker:
    """Replace AWS with this machine in this process, until `stop()` or the end of the process.

    If a session runs already, this returns it, with its images and container unchanged.

    Args:
        largest_cluster: The largest cluster that will run, as counts of instances by type, such as
            {"ml.c5.9xlarge": 1, "ml.g5.2xlarge": 1}. It determines how many cores an instance gets,
            so that jobs of different sizes can be compared. Default: the first job's cluster.
        images: The folder of the Python environment that replaces a training image, by the image's
            URI. Default: this process's own environment.
        container: A command that runs the command that follows it in a container with its own
            /opt/ml; tests/containers/container.py is one. Default: hosts are ordinary processes.

    Raises:
        RuntimeError: AWS clients already exist, jobs have run with another largest cluster, the
            path of the temporary folder is too long, or the system is not Linux.
        ValueError: an instance type is unknown, or an image's environment has no Python.
    """
    global _active
    for image, environment in (images or {}).items():
        if not Path(environment, "bin", "python").exists():
            raise ValueError(f"The environment for {image}, {environment}, has no bin/python.")
    if _active is not None:
        scale_vcpus = cluster.total_vcpus((largest_cluster or {}).items()) or _active.scale_vcpus
        if _active.jobs and scale_vcpus != _active.scale_vcpus:
            raise RuntimeError(
                "Jobs have already run with another largest cluster, so later ones could not be "
                "compared with them: restart the kernel to change it."
            )
        _active.scale_vcpus = scale_vcpus
        _active.started_again += 1
        return _active
    if not sys.platform.startswith("linux"):
        raise RuntimeError("The local SageMaker needs Linux: use Linux, WSL, or a container.")
    if len(folder := tempfile.gettempdir()) > LONGEST_TMPDIR:
        raise RuntimeError(
            f"The path of the temporary folder, {folder}, is too long for the sockets that hosts "
            f"create in it: set TMPDIR to a path of at most {LONGEST_TMPDIR} characters."
        )
    guarded = BotocoreStubber.__call__ is _answer_or_refuse  # an earlier session set this
    if not guarded and (clients := _instances(botocore.client.BaseClient)):
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


def find_job(response: SageMakerResponse, request: dict) -> FakeTrainingJob:
    """Return moto's record of the job that a request names; raise AWS's error if there is none."""
    name = request.get("TrainingJobName") or request["ResourceArn"].rpartition("/")[2]
    job = response.sagemaker_backend.training_jobs.get(name)
    if job and request.get("ResourceArn", job.arn) == job.arn:
        return job
    raise ValidationError("Requested resource not found.")


def list_jobs(response: SageMakerResponse, request: dict) -> dict:
    """List the jobs as the request asks; moto does not sort, and filters after it has counted."""
    ask, past, future = response._get_param, datetime.min, datetime.max
    jobs = [
        job
        for job in list(response.sagemaker_backend.training_jobs.values())
        if ask("NameContains", "") in job.training_job_name
        and ask("StatusEquals") in (None, job.training_job_status)
        and ask("CreationTimeAfter", past) < job.creation_time
        and ask("CreationTimeBefore", future) > job.creation_time
        and ask("LastModifiedTimeAfter", past) < job.last_modified_time
        and ask("LastModifiedTimeBefore", future) > job.last_modified_time
        and not {"WarmPoolStatusEquals", "TrainingPlanArnEquals"} & {*request}  # no job has them
    ]
    by = {"Name": "training_job_name", "Status": "training_job_status"}
    key = operator.attrgetter(by.get(ask("SortBy"), "creation_time"))
    jobs.sort(key=key, reverse=ask("SortOrder") == "Descending")
    if not (token := ask("NextToken", "0")).isdecimal():
        raise ValidationError("Invalid NextToken: use that of the previous page.")
    end = int(token) + ask("MaxResults", 100)
    page = [job.response_object for job in jobs[int(token) : end]]
    more = str(end) if jobs[end:] else None
    return {"TrainingJobSummaries": page, "NextToken": more}


def allow_everything(response: IamResponse) -> ActionResult:
    """Answer SimulatePrincipalPolicy, which the SDK calls to check a role."""
    actions = response._get_param("ActionNames")
    results = [{"EvalActionName": action, "EvalDecision": "allowed"} for action in actions]
    return ActionResult({"EvaluationResults": results, "IsTruncated": False})
