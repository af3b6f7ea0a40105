"""Scripts that fail in a framework, and what the runtime says about each; see test_reason.py.

Each takes seconds. "..." in a sentence stands for any text.
"""

from helpers.failing_scripts import NCCL

LOADER = """
import os, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, number):
        {}
for batch in torch.utils.data.DataLoader(Data(), num_workers=1, timeout={}):
    pass
"""
# Two ranks that have met. To fill in: timeout, seconds until the other exits, this rank's code.
RANKS = """
import datetime, os, time
other = os.fork() == 0
if other:
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
import torch, torch.distributed as dist
place = {{"init_method": f"file://{{os.getcwd()}}/meeting", "rank": int(other), "world_size": 2}}
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={}), **place)
dist.barrier()
if other:
    time.sleep({})
    os._exit(0)
{}
"""
TORCHRUN = """
import os, signal, time
if "RANK" not in os.environ:
    from torch.distributed.run import main
    main(["--standalone", "--nproc-per-node=2", __file__])
if os.environ["RANK"] == "1":
    {}
time.sleep(100)
"""
ACCELERATE = """
import os, sys
if "STARTED" not in os.environ:
    os.environ["STARTED"] = "by accelerate"
    options = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
    command = "accelerate.commands.launch", *options, "--dynamo_backend=no", __file__
    os.execv(sys.executable, [sys.executable, "-m", *command])
sys.exit("no usable samples")
"""
FIT = """
import keras, numpy
class Check(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            raise ValueError("no number")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(numpy.ones((160, 4)), numpy.ones(160), batch_size=8, callbacks=[Check()])
"""
LOGURU = """
import sys
from loguru import logger
logger.remove()
logger.add(sys.stderr, serialize=True)
def train(rate):
    raise ValueError("no number")
try:
    train(0.1)
except ValueError:
    logger.exception("training failed")
for word in ["logs", "figures", "weights"]:
    logger.info("{} saved", word)
sys.exit(1)
"""
HYDRA = """
import pathlib, sys, hydra
pathlib.Path("config.yaml").write_text("FILE")
sys.argv += [LINE]
@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    BODY
main()
"""


def hydra(body: str = "pass", line: str = "", file: str = "rate: 0.1") -> str:
    """Return a script with this function, command line, and file of settings."""
    return HYDRA.replace("FILE", file).replace("LINE", line).replace("BODY", body)


REDUCE = "time.sleep(1)\ndist.all_reduce(torch.ones(3))"
TRY = f"try:\n    {'; '.join(REDUCE.splitlines())}\n"
SLOW_SCRIPTS = {
    "torch, a worker's lost connection": (
        LOADER.format("raise RuntimeError('connection to the bucket timed out')", 0),
        "1: RuntimeError: Caught RuntimeError in DataLoader worker process 0. | "
        "RuntimeError: connection to the bucket timed out",
    ),
    "torch, a worker that hangs": (
        LOADER.format("time.sleep(5)", 1),
        "1: RuntimeError: DataLoader timed out after 1 seconds",
    ),
    "torch, a worker that is killed": (
        LOADER.format("os.kill(os.getpid(), 9)", 0),
        "1: RuntimeError: DataLoader worker (pid(s) ...) exited unexpectedly "
        "(after RuntimeError: DataLoader worker (pid ...) is killed by signal: Killed)",
    ),
    "torch, an error of a rank that then waits for the others": (
        RANKS.format(60, 0, f"try:\n    1 / 0\nfinally:\n    {'; '.join(REDUCE.splitlines())}"),
        "1: RuntimeError: ...Connection closed by peer ... "
        "(after ZeroDivisionError: division by zero)",
    ),
    "torch.multiprocessing": (
        "import torch.multiprocessing\ndef work(rank):\n    raise ValueError('no number')\n"
        "if __name__ == '__main__':\n    torch.multiprocessing.spawn(work, nprocs=2)",
        "1: ValueError: no number",
    ),
    "torchrun": (
        TORCHRUN.format("raise ValueError('no number')"),
        "1: ValueError: no number | ...ChildFailedError: ...",
    ),
    "torchrun, a rank that handles an error and is killed": (
        TORCHRUN.format(
            "import traceback\n    try:\n        {}['lr']\n    except KeyError:\n"
            "        traceback.print_exc()\n    os.kill(os.getpid(), signal.SIGKILL)"
        ),
        "1: KeyError: 'lr' | ... | traceback : Signal 9 (SIGKILL) received by PID ...",
    ),
    "accelerate, sys.exit with a text": (
        ACCELERATE,
        "1: no usable samples | subprocess.CalledProcessError: ...",
    ),
    "Keras, an error behind a progress bar": (FIT, "1: ValueError: no number"),
    "TensorFlow, an error while it traces": (
        "import tensorflow as tf\n@tf.function\ndef step(images):\n"
        "    if tf.reduce_sum(images) > 0:\n        raise ValueError('images must be square')\n"
        "    return images\nstep(tf.ones(3))",
        "1: ValueError: in user code: ValueError: images must be square",
    ),
    "TensorFlow, an operation of a graph": (
        "import tensorflow as tf\nstep = tf.function(tf.io.decode_jpeg)\nstep(tf.constant('x'))",
        "1: tensorflow.python.framework.errors_impl.InvalidArgumentError: "
        "Graph execution error: ...Unknown image file format...",
    ),
    "TensorFlow, an error of Python's in a pipeline": (
        "import tensorflow as tf\ndef load(number):\n    raise KeyError('no label')\n"
        "for batch in tf.data.Dataset.range(3).map("
        "lambda n: tf.py_function(load, [n], tf.int64)):\n    pass",
        "1: KeyError: 'no label'...",
    ),
    "Keras, an error in a layer": (
        "import keras, numpy\nclass Layer(keras.layers.Layer):\n    def call(self, x):\n"
        "        raise ValueError('images must be square')\n"
        "keras.Sequential([Layer()])(numpy.ones((2, 3)))",
        "1: ValueError: Exception encountered when calling Layer.call(). | ..."
        "images must be square...",
    ),
}
# In an environment with more packages.
MORE = ["hydra-core==1.3.8", "loguru==0.7.3", "wandb==0.31.0"]
MORE_SCRIPTS = {
    "loguru, JSON": (
        LOGURU,
        "1: ValueError: no number | {...",
    ),
    "wandb, sys.exit with a text": (
        "import sys, wandb\nwandb.init(project='x', mode='offline').log({'loss': 1})\n"
        "sys.exit('no usable samples')",
        "1; its last line: no usable samples",
    ),
    "Hydra, an error": (
        hydra("raise ValueError('no number')"),
        "1: ValueError: no number",
    ),
    "Hydra, a wrong command line": (
        hydra(line="'rate=[1'"),
        "1: hydra.errors.OverrideParseException: no viable alternative at input '[1' | ...",
    ),
    "Hydra, no value": (
        hydra("config.rate", file="rate: ???"),
        "1: omegaconf.errors.MissingMandatoryValue: Missing mandatory value: rate | ...",
    ),
}
# Processes that lost another rank, and did not fail by themselves.
CUT_OFF = {
    "torch, a rank that is gone, and what the script makes of it": (
        RANKS.format(60, 0, f"{TRY}except RuntimeError as e:\n    raise ValueError('end') from e"),
        "1: ValueError: end (after RuntimeError: ...Connection closed by peer ...)",
    ),
    "torch, a rank that hangs": (
        RANKS.format(2, 9, REDUCE),
        "1: RuntimeError: ...Timed out waiting 2000ms for recv operation to complete",
    ),
    "torch, a rank that is gone before a barrier": (
        RANKS.format(2, 0, "dist.monitored_barrier()"),
        "1: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in ...",
    ),
    "torch, a rank that does not come": (
        "import datetime, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:29654', rank=0,"
        " world_size=2, timeout=datetime.timedelta(seconds=1))",
        "1: torch.distributed.DistStoreError: Timed out after ... 1/2 clients joined",
    ),
    "torch, NCCL waits for a rank": (
        NCCL.replace("{}", "Watchdog caught collective operation timeout"),
        "-6: what(): [PG ID 0 ... Watchdog caught collective operation timeout | ...",
    ),
}
SLOW = {**SLOW_SCRIPTS, **MORE_SCRIPTS, **CUT_OFF}
