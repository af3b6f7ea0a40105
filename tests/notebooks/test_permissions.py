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


@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject", "s3:PutObject"])
def test_the_role_of_a_job_may_read_its_data_and_write_its_results(action: str):
    buckets = set()
    for request in REQUESTS:
        sources = [c["DataSource"]["S3DataSource"]["S3Uri"] for c in request["InputDataConfig"]]
        targets = [request["OutputDataConfig"]["S3OutputPath"]]
        for uri in targets if action == "s3:PutObject" else sources:
            bucket, prefix = uri.removeprefix("s3://").split("/", 1)
            buckets.add(bucket)
            name = bucket if action == "s3:ListBucket" else f"{bucket}/{prefix}/any"
            assert allows(Need(action, f"arn:aws:s3:::{name}"), POLICY), uri
    own, mnist = f"sagemaker-us-east-1-{ACCOUNT}", "sagemaker-example-files-prod-us-east-1"
    assert buckets == ({own} if action == "s3:PutObject" else {own, mnist})


def test_the_role_of_a_job_may_get_its_image_and_write_log_and_metrics():
    images = {request["AlgorithmSpecification"]["TrainingImage"] for request in REQUESTS}
    for image in images:
        registry, name = image.split(":")[0].split("/")
        account, _, _, region, *_ = registry.split(".")
        repository = f"arn:aws:ecr:{region}:{account}:repository/{name}"
        for action in ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer"):
            assert allows(Need(f"ecr:{action}", repository), POLICY)
    log = f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
    for action in ("CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"):
        assert allows(Need(f"logs:{action}", f"{log}:log-stream:any"), POLICY)
    for action in ("ecr:GetAuthorizationToken", "cloudwatch:PutMetricData"):
        assert allows(Need(action, "*"), POLICY)


OBJECT, PASS, FLOW = "s3:GetObject", "iam:PassRole", "sagemaker:CreateFlowDefinition"
SAGEMAKER, S3 = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}", "arn:aws:s3:::"
ROLE, SPACE = f"arn:aws:iam::{ACCOUNT}:role/service-role/any", f"{SAGEMAKER}:space/d/any"
TO, TAG, CROWD = "iam:PassedToService", "s3:ExistingObjectTag/SageMaker", "sagemaker:WorkteamType"
OURS, DATA = {TO: "sagemaker.amazonaws.com"}, f"{S3}my-data/a"
DEFINITION = f"{SAGEMAKER}:flow-definition/any"
ALLOWED_AND_NOT = [
    # a bucket with another name; an action that the policy does not have
    (Need(OBJECT, f"{S3}my-sagemaker/a"), Need(OBJECT, DATA)),
    (Need("logs:GetLogEvents", "*"), Need("logs:FilterLogEvents", "*")),
    # a role passed to another service, or to an unknown one
    (Need(PASS, ROLE, OURS), Need(PASS, ROLE, {TO: "ec2.amazonaws.com"})),
    (Need(PASS, ROLE, OURS), Need(PASS, ROLE)),
    # NotResource; a variable without a value
    (
        Need("sagemaker:CreateTrainingJob", f"{SAGEMAKER}:training-job/any"),
        Need("sagemaker:CreateDomain", f"{SAGEMAKER}:domain/any"),
    ),
    (
        Need("sagemaker:CreateSpace", SPACE, {"sagemaker:DomainId": "d"}),
        Need("sagemaker:CreateSpace", SPACE),
    ),
    # conditions that ignore case, or that apply only if there is a value
    (Need(OBJECT, DATA, {TAG: "True"}), Need(OBJECT, DATA, {TAG: "no"})),
    (Need(FLOW, DEFINITION), Need(FLOW, DEFINITION, {CROWD: "public-crowd"})),
]


@pytest.mark.parametrize("allowed, refused", ALLOWED_AND_NOT)
def test_one_of_each_kind_is_refused(allowed: Need, refused: Need):
    assert allows(allowed, POLICY)
    assert not allows(refused, POLICY)


def test_what_is_denied_is_not_allowed_by_another_statement():
    need = Need("s3:GetObject", f"{S3}my-sagemaker/a")
    deny = {"Statement": [{"Effect": "Deny", "Action": "s3:Get*", "Resource": f"{S3}*"}]}
    assert allows(need, POLICY) and not allows(need, POLICY, deny)


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
