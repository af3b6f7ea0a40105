"""Check a request against AWS's own model of it, which botocore ships.

boto3 itself checks types, required members and minimums before it sends a request. It leaves
maximums, patterns and values to AWS, or here to this file.
"""

from collections.abc import Iterator, Sized

import regex  # the model's patterns have classes such as \p{L}, which `re` does not know
from botocore.model import OperationModel, Shape
from botocore.validate import ParamValidator
from moto.sagemaker.exceptions import AWSValidationException

LONGEST_VALUE = 100  # characters of a refused value in a message; AWS repeats all of it


def check(operation: OperationModel, request: dict) -> None:
    """Raise the error that AWS returns for a request that its model forbids, in AWS's words."""
    report = ParamValidator().validate(request, operation.input_shape)  # if boto3 was told not to
    if report.has_errors():
        raise AWSValidationException(report.generate_report())
    if found := list(_violations(request, operation.input_shape, "")):
        errors = "1 validation error" if len(found) == 1 else f"{len(found)} validation errors"
        raise AWSValidationException(f"{errors} detected: {'; '.join(found)}")


def _violations(value: object, shape: Shape, path: str) -> Iterator[str]:
    """Yield each constraint that `value` violates, with the value's place in the request."""
    for constraint in _failed(value, shape):
        shown = str(value)[:LONGEST_VALUE]
        yield f"Value '{shown}' at '{path[1:]}' failed to satisfy constraint: {constraint}"
    if shape.type_name == "structure":
        for name, member in value.items():
            place = f"{path}.{name[0].lower()}{name[1:]}"
            yield from _violations(member, shape.members[name], place)
    elif shape.type_name == "list":
        for number, member in enumerate(value, start=1):
            yield from _violations(member, shape.member, f"{path}.{number}.member")
    elif shape.type_name == "map":
        for key, member in value.items():
            yield from _violations(key, shape.key, f"{path} (a key)")
            yield from _violations(member, shape.value, f"{path}.{key}")


def _failed(value: object, shape: Shape) -> Iterator[str]:
    """Yield the constraints of `shape` alone that `value` does not satisfy."""
    limits = shape.metadata
    size, what = (len(value), "length") if isinstance(value, Sized) else (value, "value")
    if "max" in limits and size > limits["max"]:
        yield f"Member must have {what} less than or equal to {limits['max']}"
    # With WORD, `.` matches no line separator, as on AWS; a vertical tab is refused here only.
    if "pattern" in limits and not regex.fullmatch(limits["pattern"], value, regex.WORD):
        yield f"Member must satisfy regular expression pattern: {limits['pattern']}"
    if "enum" in limits and value not in limits["enum"]:
        yield f"Member must satisfy enum value set: [{', '.join(limits['enum'])}]"
