"""Python functions in a pipeline that runs on data hosts."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import script_ops


def numpy_function(function: Callable, inputs: Sequence[Any], types: Any) -> Any:
    """Do the same as tf.numpy_function, but also on data hosts.

    A data host has the function if its serve.py passes it to `service.serve.main`. Both import it
    by name from a module. Raises ValueError for other functions, such as a lambda.
    """
    is_one = isinstance(types, tf.DType)
    types = [types] if is_one else types
    outputs = tf.raw_ops.PyFunc(input=inputs, token=register(function), Tout=types)
    return outputs[0] if is_one else outputs


def register(function: Callable) -> str:
    """Register a function with TensorFlow in this process as "module:name", and return that.

    tf.numpy_function numbers its functions instead, and numbers differ between processes.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"numpy_function: data hosts cannot import {name} of {module}: define the function at "
            "the top level of a module beside the training script"
        )
    script_ops._py_funcs._funcs[f"{module}:{name}"] = function  # the module keeps it alive
    return f"{module}:{name}"
