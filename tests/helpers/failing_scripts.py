"""Small scripts that fail, and what the runtime says about each; see test_reason.py.

"..." in a sentence stands for any text.
"""

import sys

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
JSON = """
import logging, sys, tqdm
sys.tracebacklimit = 100
from pythonjsonlogger.json import JsonFormatter
handler = logging.StreamHandler()
handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(message)s"))
logging.basicConfig(level="INFO", handlers=[handler])
def step(depth):
    return (step)(depth-1) LONG if depth else {}['a "b" c']
bar = tqdm.tqdm(range(10))
try:
    step(50)
except KeyError:
    logging.exception("can't train")
logging.info("logs saved")
sys.exit(1)
"""
BAR = """
import sys, time, tqdm
bar = tqdm.tqdm(total=10)
for number in range(10):
    time.sleep(0.11)
    bar.update()
    if number == 2:
        {}
"""
TASK = """
import asyncio, sys
async def beat():
    raise OSError("no answer")
async def main():
    task = asyncio.ensure_future(beat())
    await asyncio.sleep(0.01)
    sys.exit("no usable samples")
asyncio.run(main())
"""
SCRIPTS = {
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
    "an error behind tqdm's bar": (
        BAR.format("raise ValueError('no number')"),
        "1: ValueError: no number",
    ),
    "sys.exit with a text behind tqdm's bar": (
        BAR.format("sys.exit('no usable samples')"),
        "1; its last line: no usable samples",
    ),
    "an error in a long line of JSON": (
        JSON.replace("LONG", " " * 200),
        "1: KeyError: 'a \"b\" c' | {...logs saved...}",
    ),
    "sys.exit with a text, and an error in a task that nobody awaits": (
        TASK,
        "1; its last line: no usable samples",
    ),
    "a syntax error": ("print('a'\nx = 1", "1; its last line: SyntaxError: '(' was never closed"),
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
    "absl's flags": (
        "import sys\nfrom absl import app\nsys.argv += ['--sizee', '3']\napp.run(print)",
        "1: FATAL Flags parsing error: Unknown command line flag 'sizee' | Pass ...",
    ),
    "typer": (
        "import sys, typer\nsys.argv += ['--size', 'many']\n"
        "def main(size: int = 3):\n    pass\ntyper.run(main)",
        "2: Invalid value for '--size': ...valid integer...",
    ),
    "a command that fails": (
        "import subprocess\nsubprocess.run(['cat', '/no/such/file'], check=True)",
        "1: cat: /no/such/file: No such file or directory | subprocess.CalledProcessError: ...",
    ),
    "sys.exit with a text, and an error in __del__ at the end": (
        "import sys\nclass Loader:\n    def __del__(self):\n        raise AssertionError\n"
        "loader = Loader()\nsys.exit('no usable samples')",
        "1; its last line: no usable samples",
    ),
    "an error, and two in atexit": (
        "import atexit\n@atexit.register\ndef upload():\n    try:\n        1 / 0\n"
        "    finally:\n        raise OSError('no space')\nraise ValueError('no number')",
        "1: ValueError: no number",
    ),
    "an error, and one in a thread that runs on": (
        "import threading, time\ndef read():\n    time.sleep(3)\n    raise EOFError\n"
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
    # The output does not show that the first error was handled: both are quoted.
    "an error that was handled, and sys.exit with a text": (
        f"{HANDLED}sys.exit('no usable samples')",
        "1: FileNotFoundError: ...: 'cache.bin' | step=1 | no usable samples",
    ),
    "an error that was handled long before": (
        f"{HANDLED}print('step\\n' * 1000)\nsys.exit('no usable samples')",
        "1; its last line: no usable samples",
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
    "an abort": (
        "import faulthandler, os\nfaulthandler.enable()\nos.abort()",
        "-6: Fatal Python error: Aborted | Current thread ...",
    ),
    "a C++ exception": (
        NCCL.replace("{}", "CUDA error: device-side assert triggered"),
        "-6: what(): [PG ID 0 ... CUDA error: device-side assert triggered | Exception raised...",
    ),
}
if sys.version_info >= (3, 11):
    SCRIPTS["an error in a group"] = (
        "import asyncio\nasync def load(part):\n    raise ValueError(f'part {part} is empty')\n"
        "async def main():\n    async with asyncio.TaskGroup() as group:\n"
        "        group.create_task(load(1))\nasyncio.run(main())",
        "1: ValueError: part 1 is empty",
    )
