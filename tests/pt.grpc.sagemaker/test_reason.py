"""What the runtime says about a failed process: scripts, and the sentence for each.

Scripts without a framework run each time. The others take seconds each, so only the thorough test
runs them; another test reads their output from printed/. To store this output again:

    PYTHONPATH=pt.grpc.sagemaker/code python tests/pt.grpc.sagemaker/test_reason.py
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hetero.reason import reason

DEL = """
class Loader:
    def __del__(self):
        raise AssertionError("can only test a child process")
loader = Loader()
"""
HANDLED = """
import logging, os, sys
try:
    open("cache.bin")
except OSError:
    logging.exception("no cache")
print("step=1", flush=True)
"""
# What torch prints when it aborts a process that uses NCCL, with a real C++ exception.
NCCL = """
import ctypes
text = b"[PG ID 0 Rank 1] Process group watchdog thread terminated with exception: {}\\n"
text += b"Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (call stack below):\\n"
text += b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f0 in libc10.so)"
ctypes.CDLL("libstdc++.so.6")._ZSt21__throw_runtime_errorPKc(text)
"""
# "..." in a sentence stands for any text.
SCRIPTS = {
    "an error": ("raise ValueError('no number')", "1: ValueError: no number"),
    "an error of several lines": (
        "raise ValueError('6 files are missing\\n\\na\\nb\\nc\\nd\\ne\\nf')",
        "1: ValueError: 6 files are missing | a | b | ... | f",
    ),
    "an error whose first line is empty": (
        "raise ValueError('\\nno number')",
        "1: ValueError: no number",
    ),
    "an error while another is handled": (
        "try:\n    {}['lr']\nexcept KeyError:\n    raise ValueError('no learning rate')",
        "1: ValueError: no learning rate (after KeyError: 'lr')",
    ),
    "an error with a cause": (
        "try:\n    int('x')\nexcept ValueError as error:\n"
        "    raise RuntimeError('epoch 3 failed') from error",
        "1: RuntimeError: epoch 3 failed (after ValueError: invalid literal for int() ...: 'x')",
    ),
    "an error in recursion": (
        "def f(n):\n    return f(n - 1) if n else 1 / n\nf(50)",
        "1: ZeroDivisionError: division by zero",
    ),
    "an error behind a progress bar": (
        "import sys\nsys.stderr.write('Epoch 1:  50%|█████     | 1/2 [00:01<00:01]')\n1 / 0",
        "1: ZeroDivisionError: division by zero",
    ),
    "a syntax error": ("print('a'\nx = 1", "1; its last line: SyntaxError: '(' was never closed"),
    "a syntax error in a module": (
        "open('model.py', 'w').write('x = (')\nimport model",
        "1: SyntaxError: '(' was never closed",
    ),
    "sys.exit with a text": (
        "print('step=1', flush=True)\nimport sys\nsys.exit('no usable samples')",
        "1; its last line: no usable samples",
    ),
    "sys.exit with a number": (
        "print('evaluation begins', flush=True)\nimport sys\nsys.exit(3)",
        "3; its last line: evaluation begins",
    ),
    "sys.exit without output": ("import sys\nsys.exit(3)", "3"),
    "argparse": (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--size', type=int)\nparser.parse_args(['--size', 'many'])",
        "2: train.py: error: argument --size: invalid int value: 'many'",
    ),
    "a command that is not Python": (
        "import os\nos.execvp('sh', ['sh', '-c', 'cat /no/such/file'])",
        "1; its last line: cat: /no/such/file: No such file or directory",
    ),
    "an error, and one in __del__ at the end": (
        f"{DEL}raise ValueError('no number')",
        "1: ValueError: no number",
    ),
    "sys.exit with a text, and an error in __del__ at the end": (
        f"{DEL}import sys\nsys.exit('no usable samples')",
        "1; its last line: no usable samples",
    ),
    "an error, and two in atexit": (
        "import atexit\n@atexit.register\ndef upload():\n    try:\n        1 / 0\n"
        "    finally:\n        raise OSError('no space')\nraise ValueError('no number')",
        "1: ValueError: no number",
    ),
    "an error, and one in a thread that runs on": (
        "import threading, time\ndef read():\n    time.sleep(0.2)\n    raise EOFError\n"
        "threading.Thread(target=read, name='Thread-7 (_pin_memory_loop)').start()\n"
        "raise ValueError('no number')",
        "1: ValueError: no number",
    ),
    "an error in a thread, and the script then exits": (
        "import sys, threading\nthread = threading.Thread(target=lambda: 1 / 0)\n"
        "thread.start()\nthread.join()\nsys.exit('a thread has died')",
        "1: ZeroDivisionError: division by zero | a thread has died",
    ),
    "an error in a child process, and the script exits with its status": (
        "import multiprocessing, sys\ndef work():\n    raise ValueError('no number')\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start()\nchild.join()\nsys.exit(child.exitcode)",
        "1: ValueError: no number",
    ),
    "an error in logging": (
        "import logging, sys\nlogging.warning('%d steps', 'many')\nsys.exit('no usable samples')",
        "1; its last line: no usable samples",
    ),
    "an error that was handled, and another": (
        f"{HANDLED}raise ValueError('no number')",
        "1: ValueError: no number",
    ),
    # The output does not show that the first error was handled: both are quoted.
    "an error that was handled, and sys.exit with a text": (
        f"{HANDLED}sys.exit('no usable samples')",
        "1: FileNotFoundError: ...: 'cache.bin' | step=1 | no usable samples",
    ),
    "an error that was handled long before": (
        f"{HANDLED}print('step\\n' * 1000)\nsys.exit('no usable samples')",
        "1; its last line: no usable samples",
    ),
    "an error and advice": (
        "import atexit\n"
        "atexit.register(print, '\\nSet HYDRA_FULL_ERROR=1 for a complete stack trace.')\n"
        "raise ValueError('no number')",
        "1: ValueError: no number | Set HYDRA_FULL_ERROR=1 for a complete stack trace",
    ),
    "an error in Rich's box": (
        "import rich.traceback\nrich.traceback.install(show_locals=True)\n"
        "def step(number):\n    raise ValueError('no number')\nstep(1)",
        "1: ValueError: no number",
    ),
    "errors of two processes, line by line": (
        "import sys\nfor line in ['Traceback (most recent call last):', \"  File 'x', line 1\","
        " '    main()', 'ValueError: no number']:\n    print(line, line, sep='\\n', flush=True)\n"
        "sys.exit(1)",
        "1: ...ValueError: no number...",
    ),
    "an end within a traceback": (
        "import os\nprint('step=1\\nTraceback (most recent call last):', flush=True)\nos._exit(3)",
        "3; its last line: step=1",
    ),
    "a C++ exception": (
        NCCL.replace("{}", "CUDA error: device-side assert triggered"),
        "-6: what():  [PG ID 0 ... CUDA error: device-side assert triggered | Exception raised...",
    ),
}
if sys.version_info >= (3, 11):
    SCRIPTS["an error in a group"] = (
        "import asyncio\nasync def load(part):\n    raise ValueError(f'part {part} is empty')\n"
        "async def main():\n    async with asyncio.TaskGroup() as group:\n"
        "        group.create_task(load(1))\nasyncio.run(main())",
        "1: ValueError: part 1 is empty",
    )

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
REDUCE = "time.sleep(1)\ndist.all_reduce(torch.ones(3))"
TRY = f"try:\n    {'; '.join(REDUCE.splitlines())}\n"
SLOW_SCRIPTS = {
    "torch, a worker's error": (
        LOADER.format("raise ValueError(f'sample {number} is broken')", 0),
        "1: ValueError: Caught ValueError in DataLoader worker process 0. | "
        "ValueError: sample 0 is broken",
    ),
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
    "torch, a model that does not fit": (
        "import torch\ntorch.nn.Linear(2, 2).load_state_dict({'other': torch.ones(1)})",
        "1: RuntimeError: Error(s) in loading state_dict for Linear: "
        'Missing key(s) in state_dict: "weight", "bias". | '
        'Unexpected key(s) in state_dict: "other"',
    ),
    "torch, an error of a rank": (
        RANKS.format(60, 1, "raise ValueError('no number')"),
        "1: ValueError: no number",
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
    "torchrun": (TORCHRUN.format("raise ValueError('no number')"), "1: ValueError: no number"),
    "torchrun, a rank that is killed": (
        TORCHRUN.format("os.kill(os.getpid(), signal.SIGKILL)"),
        "1: ...ChildFailedError: ...train.py FAILED | ... | "
        "traceback : Signal 9 (SIGKILL) received by PID ...",
    ),
    "TensorFlow, an error while it traces": (
        "import tensorflow as tf\n@tf.function\ndef step(images):\n"
        "    if tf.reduce_sum(images) > 0:\n        raise ValueError('images must be square')\n"
        "    return images\nstep(tf.ones(3))",
        "1: ValueError: in user code: ValueError: images must be square",
    ),
    "TensorFlow, an operation": (
        "import tensorflow as tf\ntf.matmul(tf.ones((2, 3)), tf.ones((2, 3)))",
        "1: tensorflow.python.framework.errors_impl.InvalidArgumentError: ..."
        "Matrix size-incompatible: In[0]: [2,3], In[1]: [2,3] ...",
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
# Processes that lost another rank, and did not fail by themselves.
CUT_OFF = {
    "torch, a rank that is gone": (
        RANKS.format(60, 0, REDUCE),
        "1: RuntimeError: ...Connection closed by peer ...",
    ),
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
    "torch, rank 0 does not come": (
        "import datetime, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:1', rank=1,"
        " world_size=2, timeout=datetime.timedelta(seconds=1))",
        "1: torch.distributed.DistNetworkError: The client socket has timed out after ...",
    ),
    "torch, NCCL waits for a rank": (
        NCCL.replace("{}", "Watchdog caught collective operation timeout"),
        "-6: what():  [PG ID 0 ... Watchdog caught collective operation timeout | ...",
    ),
}
SLOW = {**SLOW_SCRIPTS, **CUT_OFF}


def stored(name: str) -> Path:
    """Return the file with a slow script's output."""
    return Path(__file__).parent / "printed" / (re.sub(r"[^\w.]+", "-", name) + ".txt")


def printed(script: str, folder: Path) -> str:
    """Run a script as train.py; return its output, and its exit status as the last line."""
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as in AWS's images
    command, pipes = [sys.executable, "train.py"], {"stdout": -1, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, **pipes, timeout=120)
    return f"{done.stdout.decode()}\n{done.returncode}\n"


def check(name: str, output: str) -> None:
    """Check what the runtime says about this output."""
    *lines, status = output.splitlines()
    why, was_cut_off = reason(lines[-1000:])  # process.py remembers this many
    _, sentence = {**SCRIPTS, **SLOW}[name]
    pattern = re.escape(sentence).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, f"{status}{why}"), f"{status}{why}"
    assert was_cut_off == (name in CUT_OFF)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_reason_is_what_has_ended_the_process(name: str, tmp_path: Path):
    check(name, printed(SCRIPTS[name][0], tmp_path))


@pytest.mark.parametrize("name", SLOW)
def test_the_reason_is_what_has_ended_a_framework_s_process(name: str):
    check(name, stored(name).read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("name", SLOW)
def test_frameworks_still_print_what_is_stored(name: str, tmp_path: Path):
    check(name, printed(SLOW[name][0], tmp_path))


def main() -> None:
    """Store the slow scripts' output, without the names of this machine's folders."""
    for name, (script, _) in SLOW.items():
        with tempfile.TemporaryDirectory() as folder:
            output = printed(script, Path(folder)).replace(folder, "/opt/ml/code")
        output = re.sub(r"[\w/.]+/site-packages/", "/site-packages/", output)
        output = re.sub(r"[\w/.]+(/lib/python3\.\d+/|/bin/python)", r"/usr\1", output)
        stored(name).write_text(output)


if __name__ == "__main__":
    main()
