"""Each constraint of AWS's own model, violated once, is refused before anything starts."""

import copy
import json
from collections.abc import Iterator

import boto3
import pytest
import regex
from botocore.exceptions import ClientError, ParamValidationError
from botocore.model import Shape

from helpers.jobs import Jobs, request
from helpers.pages import ROOT
from shared.local_sagemaker import api_model, supported

pytestmark = pytest.mark.usefixtures("nothing_is_left")
OTHER = "<\n\u2028> no"  # no pattern allows it, except those that allow everything
ARN = "arn:aws:sagemaker:us-east-1:111122223333:training-job/any"
# The calls that the local SageMaker answers, and what each needs at least.
START = {
    "CreateTrainingJob": request("any"),
    "DescribeTrainingJob": {"TrainingJobName": "any"},
    "StopTrainingJob": {"TrainingJobName": "any"},
    "ListTrainingJobs": {},
    "ListTags": {"ResourceArn": ARN},
}


def example(shape: Shape) -> object:
    """Return a small value of this shape with all that is required; patterns may not match it."""
    least = max(shape.metadata.get("min", 0), 1)
    if shape.type_name == "structure":
        return {name: example(shape.members[name]) for name in shape.required_members}
    if shape.type_name == "list":
        return [example(shape.member)] * least
    if shape.type_name == "string":
        return next(iter(shape.enum), "a" * least)
    return {"map": {}, "boolean": True, "timestamp": 0}.get(shape.type_name, least)


def violations(shape: Shape) -> Iterator[tuple[object, str]]:
    """Yield values that violate one constraint of this shape, and what AWS says of each."""
    limits = shape.metadata
    if most := limits.get("max"):
        values = {"map": {f"k{n}": "v" for n in range(most + 1)}, "string": "a" * (most + 1)}
        if shape.type_name == "list":
            values["list"] = [example(shape.member)] * (most + 1)
        what = "length" if shape.type_name in values else "value"
        says = f"Member must have {what} less than or equal to {most}"
        yield values.get(shape.type_name, most + 1), says
    if least := limits.get("min"):
        values = {"list": [], "string": "a" * (least - 1)}
        yield values.get(shape.type_name, least - 1), "Invalid (length|range|value)"
    other = OTHER * (limits.get("min", 0) // len(OTHER) + 1)
    if "pattern" in limits and not regex.fullmatch(limits["pattern"], other):
        says = f"Member must satisfy regular expression pattern: {limits['pattern']}"
        yield other, regex.escape(says)
    if shape.type_name == "string" and shape.enum:
        says = f"Member must satisfy enum value set: [{', '.join(shape.enum)}]"
        yield OTHER, regex.escape(says)


def places(shape: Shape, path: tuple = (), above: tuple = ()) -> Iterator[tuple[tuple, Shape]]:
    """Yield the path to every member of a shape, and the member's shape."""
    if path:
        yield path, shape
    if shape.type_name == "structure" and shape.name not in above:
        for name, member in shape.members.items():
            yield from places(member, (*path, name), (*above, shape.name))
    elif shape.type_name == "list":
        yield from places(shape.member, (*path, 0), above)
    elif shape.type_name == "map":
        yield from places(shape.value, (*path, "key"), above)


def put(start: dict, shape: Shape, path: tuple, value: object) -> dict:
    """Return a request with this value at the path, and with all that is required around it."""
    asked = there = copy.deepcopy(start)
    for key, following in zip(path, (*path[1:], None), strict=True):
        shape = shape.members[key] if shape.type_name == "structure" else _part(shape)
        if following is None:
            there[key] = value
        elif shape.type_name == "list":
            there = there.setdefault(key, []) if isinstance(there, dict) else there[key]
            there += [example(shape.member)] * (not there)
        else:
            new = example(shape)
            there = there.setdefault(key, new) if isinstance(there, dict) else there[key]
    return asked


def _part(shape: Shape) -> Shape:
    return shape.member if shape.type_name == "list" else shape.value


def named(path: tuple) -> str:
    """Return a member's place as AWS's messages name it."""
    words = [f"{key + 1}.member" if isinstance(key, int) else key for key in path]
    return ".".join(word if word == "key" else word[0].lower() + word[1:] for word in words)


@pytest.mark.parametrize("operation", START)
def test_every_constraint_of_the_model_is_refused(jobs: Jobs, operation: str):
    client = boto3.client("sagemaker")
    shape = client.meta.service_model.operation_model(operation).input_shape
    call = getattr(client, regex.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower())
    tried = 0
    for path, member in places(shape):
        for value, says in violations(member):
            with pytest.raises((ClientError, ParamValidationError)) as error:
                call(**put(START[operation], shape, path, value))
            text = str(error.value)
            if isinstance(error.value, ClientError):
                says = rf"at '{regex.escape(named(path))}' failed to satisfy constraint: {says}"
            assert regex.search(says, text), (path, value, text)
            tried += 1
    assert tried >= {"CreateTrainingJob": 200, "ListTrainingJobs": 8}.get(operation, 2)


def test_a_key_of_a_map_has_constraints_too(jobs: Jobs):
    client = boto3.client("sagemaker")
    for settings, says in (
        ({"Environment": {"A-B": "1"}}, r"Value 'A-B' at 'environment \(a key\)' .*\[a-zA-Z_\]"),
        ({"HyperParameters": {"n" * 257: "1"}}, r"'hyperParameters \(a key\)' .*equal to 256"),
    ):
        with pytest.raises(ClientError, match=says):
            client.create_training_job(**request("keys", **settings))


def test_stored_requests_satisfy_the_model():
    """What the notebooks send to AWS."""
    shape = boto3.client("sagemaker", region_name="us-east-1").meta.service_model
    operation, checked = shape.operation_model("CreateTrainingJob"), 0
    for path in (ROOT / "tests" / "notebooks" / "requests").glob("*.json"):
        for stored in json.loads(path.read_text()):
            text = json.dumps({k: v for k, v in stored.items() if k != "Command"})
            text = text.replace("<time>", "20260101000000").replace("<token>", "0" * 32)
            api_model.check(operation, json.loads(text))
            checked += 1
    assert checked > 5


def table() -> str:
    """Return docs/moving.md's table of the parts of CreateTrainingJob that are here."""

    def names(members: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in members)

    rows = []
    for structure in dict.fromkeys(
        [*supported.AS_ON_AWS, *supported.ONLY_CHECKED, *supported.ONLY]
    ):
        values = [
            f"`{name}`: {' or '.join(values)}"
            for name, values in supported.ONLY.get(structure, {}).items()
        ]
        cells = [
            f"`{structure}`" if structure else "",
            names(supported.AS_ON_AWS.get(structure, [])),
            ", ".join(values),
            names(supported.ONLY_CHECKED.get(structure, [])),
        ]
        rows.append(f"| {' | '.join(cells)} |".replace("|  ", "| "))
    return "\n".join(rows)


def test_the_page_shows_the_parts_that_the_code_has(jobs: Jobs):
    page = (ROOT / "docs" / "moving.md").read_text()
    assert table() in page, table()
    assert all(f"`{name}`" in page for name in START)
    with pytest.raises(ClientError, match="does not do DeleteTags") as refused:
        boto3.client("sagemaker").delete_tags(ResourceArn=ARN, TagKeys=["x"])
    assert str(refused.value).endswith(f"It does {', '.join(START)}.")
