"""Check calls against IAM's rules for identity-based policies, as far as the examples need them.

Sources: IAM User Guide, "Policy evaluation logic" and "IAM JSON policy elements reference", for the
rules; Service Authorization Reference for the permissions of each call. Anything that is not
implemented here raises LookupError.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import boto3
from botocore.awsrequest import AWSResponse
from botocore.handlers import BUILTIN_HANDLERS
from moto.iam.aws_managed_policies import aws_managed_policies_data

ACCOUNT = "123456789012"  # moto's
# The SDK tries these calls, and continues if they are denied.
TOLERATED = {"iam:GetRole", "iam:SimulatePrincipalPolicy"}
# IAM's names for the services whose calls are made, by botocore's names.
PREFIXES = {
    "cloudwatch": "cloudwatch",
    "iam": "iam",
    "logs": "logs",
    "pricing": "pricing",
    "s3": "s3",
    "sagemaker": "sagemaker",
    "service-quotas": "servicequotas",
}
# The S3 permission that each call needs; many have other names than the call.
S3_ACTIONS = {
    "AbortMultipartUpload": "AbortMultipartUpload",
    "CompleteMultipartUpload": "PutObject",
    "CreateBucket": "CreateBucket",
    "CreateMultipartUpload": "PutObject",
    "DeleteObject": "DeleteObject",
    "GetObject": "GetObject",
    "HeadBucket": "ListBucket",
    "HeadObject": "GetObject",
    "ListBuckets": "ListAllMyBuckets",
    "ListObjects": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "PutObject": "PutObject",
    "UploadPart": "PutObject",
}


@dataclass(frozen=True)
class Call:
    """A call to AWS: botocore's names of service and operation, and its arguments."""

    service: str
    operation: str
    arguments: Mapping = field(default_factory=dict)
    region: str = "us-east-1"


@dataclass(frozen=True)
class Need:
    """A permission that a call needs: an action on a resource, in a context."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def needs(call: Call) -> list[Need]:
    """List the permissions that a call needs; raise LookupError if they are not known here."""
    arguments, name = call.arguments, call.operation
    if (call.service, name) == ("sts", "GetCallerIdentity"):
        return []  # "No permissions are required to perform this operation" (its API reference)
    if call.service not in PREFIXES:
        raise LookupError(f"{call.service}: the permissions for its calls are not known here.")
    if call.service == "s3":
        return _s3_needs(name, arguments)
    place = f"{call.service}:{call.region}:{ACCOUNT}"
    resource = "*"
    if call.service == "sagemaker" and "TrainingJobName" in arguments:
        resource = f"arn:aws:{place}:training-job/{arguments['TrainingJobName']}"
    elif call.service == "logs" and "logGroupName" in arguments:
        resource = f"arn:aws:{place}:log-group:{arguments['logGroupName']}"
        resource += f":log-stream:{arguments.get('logStreamName', '')}"
    elif call.service == "iam":
        role = arguments.get("PolicySourceArn") or arguments["RoleName"]
        resource = role if role.startswith("arn:") else f"arn:aws:iam::{ACCOUNT}:role/{role}"
    found = [Need(f"{PREFIXES[call.service]}:{name}", resource)]
    if name == "CreateTrainingJob":
        passed = {"iam:PassedToService": "sagemaker.amazonaws.com"}
        found.append(Need("iam:PassRole", arguments["RoleArn"], passed))
        if arguments.get("Tags"):
            tagging = {"sagemaker:TaggingAction": "CreateTrainingJob"}
            found.append(Need("sagemaker:AddTags", resource, tagging))
    return found


def _s3_needs(name: str, arguments: Mapping) -> list[Need]:
    if name == "ListBuckets":
        return [Need("s3:ListAllMyBuckets", "*")]
    bucket = f"arn:aws:s3:::{arguments['Bucket']}"
    if name == "DeleteObjects":
        keys = [item["Key"] for item in arguments["Delete"]["Objects"]]
        return [Need("s3:DeleteObject", f"{bucket}/{key}") for key in keys]
    if name not in S3_ACTIONS:
        raise LookupError(f"S3's {name}: the permissions it needs are not known here.")
    key = f"/{arguments['Key']}" if "Key" in arguments else ""
    return [Need(f"s3:{S3_ACTIONS[name]}", bucket + key)]


@functools.cache
def managed_policy(name: str) -> dict:
    """Return the document of one of AWS's managed policies, from moto."""
    return json.loads(aws_managed_policies_data)[name]["Document"]


def inline_policy(actions: list[str]) -> dict:
    """Return a policy document that allows these actions on all resources."""
    return {"Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}


def missing(call: Call, *documents: dict) -> list[str]:
    """List the actions that a call needs but that the documents together do not allow."""
    return [need.action for need in needs(call) if not allows(need, *documents)]


def allows(need: Need, *documents: dict) -> bool:
    """Whether some statement allows the action and none denies it."""
    statements = [s for document in documents for s in document["Statement"]]
    effects = {s["Effect"] for s in statements if _applies(s, need)}
    return effects == {"Allow"}


def _applies(statement: dict, need: Need) -> bool:
    """Whether a statement applies to what is needed."""
    if unknown := statement.keys() - {"Sid", "Effect", "Action", "Resource", "NotResource",
                                      "Condition"}:  # fmt: skip
        raise LookupError(f"A statement has {', '.join(unknown)}, which is not implemented here.")
    # Unlike resources, actions are not case-sensitive.
    if not any(_like(a.lower(), need.action.lower()) for a in _listed(statement["Action"])):
        return False
    resources = statement.get("Resource") or statement["NotResource"]
    matches = any(_like(pattern, need.resource) for pattern in _listed(resources))
    return matches == ("Resource" in statement) and all(
        _holds(operator, need.context.get(key), _listed(values))
        for operator, pairs in statement.get("Condition", {}).items()
        for key, values in pairs.items()
    )


def _holds(operator: str, value: str | None, wanted: list[str]) -> bool:
    """Whether the context's value meets a condition; one of the wanted values must match."""
    if operator == "Null":
        return (value is None) == (wanted == ["true"])
    if operator == "StringEquals" or (value is None and not operator.endswith("IfExists")):
        return value in wanted
    raise LookupError(f"The condition {operator} is not implemented here.")


def _like(pattern: str, text: str) -> bool:
    """Whether text matches a pattern: * is any text, ? any character."""
    if "${" in pattern:
        raise LookupError(f"The variable in {pattern} is not implemented here.")
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, text, re.DOTALL) is not None


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def enforce(*documents: dict) -> tuple[set[str], set[str]]:
    """Deny this process's calls that the documents do not allow, as AWS would.

    The local SageMaker's own calls are not checked, because AWS makes these, not the user. Returns
    two sets that grow with each call: the operations that were allowed, and the actions that were
    missing.
    """
    allowed, absent = set(), set()
    from shared.local_sagemaker import job, session

    job.boto3 = session.boto3 = boto3.Session()  # this session gets none of the handlers below

    def record(params: dict, model, context: dict, **_: object) -> None:
        service = model.service_model.service_name
        call = Call(service, model.name, dict(params), context["client_region"])
        try:
            context["missing"] = missing(call, *documents)
        except LookupError as error:  # if this were raised, the SDK might ignore it
            context["missing"] = [str(error)]

    def refuse(model, params: dict, context: dict, **_: object) -> tuple | None:
        if not context["missing"]:
            allowed.add(model.name)
            return None
        absent.update(context["missing"])
        error = {"Code": "AccessDenied", "Message": f"not allowed: {context['missing']}"}
        metadata = {"HTTPStatusCode": 403, "HTTPHeaders": {}, "RetryAttempts": 0}
        answer = {"Error": error, "ResponseMetadata": metadata}
        return AWSResponse(params["url"], 403, {}, None), answer

    BUILTIN_HANDLERS.append(("before-parameter-build", record))
    BUILTIN_HANDLERS.append(("before-call", refuse))

    return allowed, absent
