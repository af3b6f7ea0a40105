"""What a step of the TensorFlow example takes with tf.distribute, and what with Horovod.

    python benchmarks/distribution.py

Trains on one repeated batch, with one rank and with two on this machine, each on a core of its own:
by tf.distribute in this environment, and by Horovod in the replica of AWS's last image that has it,
with the TensorFlow of that image. `make containers` builds the replica.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import ROOT, at_least_two_cores, free_port, write_results

CODE = ROOT / "tf.data.service.sagemaker" / "code"
REPLICA = ROOT / ".containers" / "tensorflow-2.12" / "bin" / "python"
WAYS = {  # the programs before train_dnn.py
    "tf.distribute": [sys.executable],
    "horovod": [str(REPLICA), str(CODE / "ranks" / "horovod_rank.py")],
}
MODELS = {"small": (32, 120), "resnet50": (16, 21)}  # batch size, steps
TURNS, LIMIT_SECONDS = 3, 300

sys.path.append(str(CODE))
from hetero.topology import WORKER_PORT, Cluster, rank_environment  # noqa: E402


def step_times(way: str, model: str, ranks: int, cores: list[int]) -> list[float]:
    """Train with so many ranks; return the steps' times in milliseconds, each of some steps."""
    batch_size, steps = MODELS[model]
    port = free_port() - WORKER_PORT - 1  # of the first rank
    cluster = Cluster("host", "dnn", "", "lo", {"dnn": ["host"]}, {"host": "127.0.0.1"}, port)
    with tempfile.TemporaryDirectory() as folder:
        command = [*WAYS[way], str(CODE / "train_dnn.py"), "--distribution", way]
        command += ["--data-mode", "synthetic", "--model", model, "--batch-size", str(batch_size)]
        command += ["--max-steps", str(steps), "--log-every", "2", "--model-dir", folder]
        logs = [Path(folder, f"{rank}.log") for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                ["taskset", "--cpu-list", str(cores[rank]), *command],
                env={**os.environ, **rank_environment(cluster, rank, ranks)},
                stdout=logs[rank].open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with Horovod's rendezvous server, which does not end
            )
            for rank in range(ranks)
        ]
        try:
            ends = [process.wait(LIMIT_SECONDS) for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # nobody is left
                    os.killpg(process.pid, signal.SIGKILL)
        if any(ends):
            sys.exit(f"{way} failed:\n{logs[0].read_text()[-2000:]}")
        return [float(ms) for ms in re.findall(r"step_time_ms=([\d.]+)", logs[0].read_text())]


def main() -> None:
    """Measure in turns; print medians, and how they compare."""
    if not REPLICA.exists():
        print("distribution.py needs the replica with Horovod: `make containers` builds it.")
        return
    cores, found = at_least_two_cores(), {}
    print("Step time in ms: tf.distribute, Horovod, and their ratio")
    for model, (batch_size, _) in MODELS.items():
        for ranks in (1, 2):
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(TURNS):
                for way, values in times.items():
                    values += step_times(way, model, ranks, cores)
            ours, other = (median(times[way]) for way in WAYS)
            row = f"{model}, {ranks} x {batch_size}"
            print(f"{row:20} {ours:7.1f} {other:7.1f} {ours / other:6.2f}", flush=True)
            found[row] = times
    write_results("distribution", found)


if __name__ == "__main__":
    main()
