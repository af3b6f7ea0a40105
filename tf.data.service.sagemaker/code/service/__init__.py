"""Run a tf.data pipeline on data hosts, with one line in the training script. Copy this folder.

    dataset = distribute(dataset)  # after the last map and batch

distributed.py  distribute
refusals.py     which ops it refuses, and why
state.py        renews its random numbers; refuses variables and tables that can change
same.py         all ranks send the same pipeline
graph.py        a pipeline as a graph
waiting.py      what it prints until the first batch arrives
functions.py    numpy_function: Python functions in a pipeline
serve.py        the program of a data host: python service/serve.py
"""

from service.distributed import distribute
from service.functions import numpy_function

__version__ = "2026-11-28"  # CHANGES.md says what else to change when you update your copy
__all__ = ["distribute", "numpy_function"]
