"""tf.data.service by one line of a training script: copy this folder.

    dataset = distribute(dataset)  # after the last map and batch

distributed.py  the line
pipelines.py    which pipelines it refuses, and why
waiting.py      what is said until the first batch comes
functions.py    Python functions in a pipeline: numpy_function
serve.py        a data host: python service/serve.py
"""

from service.distributed import distribute
from service.functions import numpy_function

__version__ = "2026-11-25"  # CHANGES.md says what to change beside a new copy
__all__ = ["distribute", "numpy_function"]
