"""docs/aws.md lists all permissions that the calls of the notebooks and of `shared` need.

Other tests check the notebooks' calls when they run. conftest.py makes each kernel deny what the
policy does not allow; test_requests.py does so with the notebooks' target set to AWS;
test_workshop.py calls the commands and the clean-up.
"""

import json
import re

import pytest
from botocore.exceptions import ClientError

from helpers.pages import ROOT
from helpers.permissions import ACCOUNT, Call, Need, allows, inline_policy, managed_policy, missing
from shared import costs

pytestmark = pytest.mark.quick
POLICY = managed_policy("AmazonSageMakerFullAccess")
# The page's table of the actions that are needed in addition to the policy.
PAGE = ROOT / "docs" / "aws.md"
BEYOND = re.findall(r"^\| `(\w+:\w+)` \|", PAGE.read_text(), re.MULTILINE)


def test_with_the_policy_the_sdk_finds_nothing_missing_in_the_role():
    """The SDK refuses roles that lack one of these actions, if the caller may query IAM."""
    from sagemaker.core.helper import iam_role_resolver

    actions = iam_role_resolver._get_smoke_test_actions("training")
    assert actions and all(allows(Need(action, "*"), POLICY) for action in actions)


def test_page_lists_what_is_needed_beyond_the_policy():
    calls = [
        Call("iam", "GetRole", {"RoleName": "role"}),
        Call("iam", "SimulatePrincipalPolicy", {"PolicySourceArn": "arn:aws:iam::1:role/role"}),
        Call("pricing", "GetProducts", {"ServiceCode": "AmazonSageMaker"}),
        Call("service-quotas", "ListServiceQuotas", {"ServiceCode": "sagemaker"}),
    ]
    assert [action for call in calls for action in missing(call, POLICY)] == BEYOND
    assert not any(missing(call, POLICY, inline_policy(BEYOND)) for call in calls)


@pytest.mark.parametrize("may", [False, True])
def test_prices_are_refreshed_with_what_the_page_lists(may: bool, monkeypatch, capsys):
    made = []

    def judge(self, operation: str, arguments: dict) -> dict:
        made.append(Call(self.meta.service_model.service_name, operation, arguments))
        if missing(made[-1], POLICY, *[inline_policy(BEYOND)] * may):
            raise ClientError({"Error": {"Code": "AccessDeniedException"}}, operation)
        return {"PriceList": []}

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", judge)
    assert costs.main(["--refresh", "us-east-1"]) == 2
    assert [call.operation for call in made] == ["GetProducts"]
    said = capsys.readouterr().err
    assert ("no training prices of region" in said) == may != ("AccessDenied" in said)


FILES = (ROOT / "tests" / "notebooks" / "requests").glob("*.json")
REQUESTS = [request for file in FILES for request in json.loads(file.read_text())]
OBJECT, PASS, TO = "s3:GetObject", "iam:PassRole", "iam:PassedToService"
SAGEMAKER, S3 = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}", "arn:aws:s3:::"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/service-role/any"
OURS = Need(PASS, ROLE, {TO: "sagemaker.amazonaws.com"})


def test_the_role_of_a_job_may_do_what_the_job_needs():
    """Read its data and image, and write its results, log and metrics."""
    log = f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
    actions = ("CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents")
    needed = [Need(f"logs:{action}", f"{log}:log-stream:any") for action in actions]
    needed += [Need("ecr:GetAuthorizationToken", "*"), Need("cloudwatch:PutMetricData", "*")]
    own, mnist = f"sagemaker-us-east-1-{ACCOUNT}", "sagemaker-example-files-prod-us-east-1"
    read = set()
    for request in REQUESTS:
        sources = [c["DataSource"]["S3DataSource"]["S3Uri"] for c in request["InputDataConfig"]]
        target = request["OutputDataConfig"]["S3OutputPath"]
        read |= {uri.split("/")[2] for uri in sources}
        assert target.split("/")[2] == own
        for uri in sources:
            place = uri.replace("s3://", "arn:aws:s3:::")
            needed += [Need("s3:ListBucket", place.split("/")[0]), Need(OBJECT, f"{place}/any")]
        needed.append(Need("s3:PutObject", f"{target.replace('s3://', 'arn:aws:s3:::')}/any"))
        registry, name = request["AlgorithmSpecification"]["TrainingImage"].split(":")[0].split("/")
        account, _, _, region, *_ = registry.split(".")
        image = f"arn:aws:ecr:{region}:{account}:repository/{name}"
        for action in ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer"):
            needed.append(Need(f"ecr:{action}", image))
    assert read == {own, mnist}
    assert not [need for need in needed if not allows(need, POLICY)]


@pytest.mark.parametrize(
    "allowed, refused",
    [
        # a bucket with another name; an action that the policy does not have
        (Need(OBJECT, f"{S3}my-sagemaker/a"), Need(OBJECT, f"{S3}my-data/a")),
        (Need("logs:GetLogEvents", "*"), Need("logs:FilterLogEvents", "*")),
        # a role passed to another service, or to an unknown one
        (OURS, Need(PASS, ROLE, {TO: "ec2.amazonaws.com"})),
        (OURS, Need(PASS, ROLE)),
        # NotResource
        (Need("sagemaker:CreateTrainingJob", f"{SAGEMAKER}:training-job/any"),
         Need("sagemaker:CreateDomain", f"{SAGEMAKER}:domain/any")),
    ],
)  # fmt: skip
def test_one_of_each_kind_is_refused(allowed: Need, refused: Need):
    assert allows(allowed, POLICY)
    assert not allows(refused, POLICY)


def test_calls_need_more_than_their_names_say():
    without_passing = {"Statement": [s for s in POLICY["Statement"] if "Pass" not in s["Sid"]]}
    create = Call("sagemaker", "CreateTrainingJob", {"TrainingJobName": "any", "RoleArn": ROLE})
    assert missing(create, POLICY) == []
    assert missing(create, without_passing) == ["iam:PassRole"]
    foreign = {"Bucket": "my-data", "Key": "a"}
    assert missing(Call("s3", "UploadPart", foreign), POLICY) == ["s3:PutObject"]
    assert missing(Call("s3", "HeadObject", foreign), POLICY) == ["s3:GetObject"]
    assert missing(Call("s3", "HeadBucket", foreign), POLICY) == []
    keys = {"Bucket": "my-data", "Delete": {"Objects": [{"Key": "a"}, {"Key": "b"}]}}
    assert missing(Call("s3", "DeleteObjects", keys), POLICY) == ["s3:DeleteObject"] * 2
    with pytest.raises(LookupError, match="PutBucketPolicy: the permissions it needs"):
        missing(Call("s3", "PutBucketPolicy", foreign), POLICY)
    with pytest.raises(LookupError, match="ec2: the permissions for its calls"):
        missing(Call("ec2", "RunInstances"), POLICY)
