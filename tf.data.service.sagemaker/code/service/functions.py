"""Python functions in a pipeline that runs on data hosts."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import script_ops


def numpy_function(function: Callable, inputs: Sequence[Any], types: Any) -> Any:
    """Return what tf.numpy_function would, on a data host too.

    The host has the function if its serve.py gives it to `service.serve.main`. It must be one of a
    module that both import, by its name. Raises ValueError for another, such as a lambda.
    """
    is_one = isinstance(types, tf.DType)
    types = [types] if is_one else types
    outputs = tf.raw_ops.PyFunc(input=inputs, token=register(function), Tout=types)
    return outputs[0] if is_one else outputs


def register(function: Callable) -> str:
    """Let TensorFlow find a function in this process by module and name; return both.

    tf.numpy_function numbers functions, which would be other ones in another process.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"numpy_function: data hosts cannot import {name} of {module}: let it be a function of "
            "a module beside the training script, at its top level"
        )
    script_ops._py_funcs._funcs[f"{module}:{name}"] = function  # the module keeps it alive
    return f"{module}:{name}"
