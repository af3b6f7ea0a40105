"""measured.py: one run says what takes two jobs, on scripts that were not written for it."""

import functools
import http.server
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from test_advisor import refusal, run

from jobs import ROOT
from shared import measured as module
from shared import prediction
from shared.measured import measured

P4D = {"instance_type": "ml.p4d.24xlarge"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No instance of EC2 answers, and no test measures what another has begun.

    One thread: several would wait for each other where other programs have a core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(module, "_loops", {})
    # Not for others: h5py, which TensorFlow imports, would crash at the end of the process.
    monkeypatch.setattr(module, "atexit", SimpleNamespace(register=lambda report: None))
    yield
    torch.set_num_threads(threads)


def numbers(printed: str) -> dict:
    """What the line of JSON says."""
    [line] = [line for line in printed.splitlines() if line.startswith(prediction.NUMBERS)]
    return json.loads(line)["measured"]


# --- In a world of its own, where only what is asked for takes time: to the millisecond. ---


@pytest.fixture
def clock(monkeypatch):
    """The time that measured.py sees: `now` in seconds."""
    world = SimpleNamespace(now=0.0)
    world.perf_counter = lambda: world.now
    world.sleep = lambda seconds: setattr(world, "now", world.now + seconds)
    monkeypatch.setattr(module, "time", world)
    return world


class SimulatedLoader:
    """Takes its time as a DataLoader does: each worker makes every num_workers-th batch in turn."""

    def __init__(self, clock, num_workers, seconds, length=400, prefetch_factor=2):
        self.clock, self.num_workers, self.seconds = clock, num_workers, seconds
        self.length, self.prefetch_factor = length, prefetch_factor

    def __len__(self):
        return self.length

    def __iter__(self):
        self.ready = []  # when each batch that has been asked for is
        for number in range(self.length):
            if self.num_workers:
                self.ask(number)
                self.clock.now = max(self.clock.now, self.ready[number])
                self.ask(number + 1)
            else:
                self.clock.now += self.seconds
            yield {"number": number}

    def ask(self, number):
        """Have the workers prepare as many batches from `number` on as they may."""
        for n in range(len(self.ready), number + self.prefetch_factor * self.num_workers):
            free = self.ready[n - self.num_workers] if n >= self.num_workers else 0.0
            self.ready.append(max(free, self.clock.now) + self.seconds)


def train(clock, loader, seconds: float) -> list:
    """One epoch: the batches that there were."""
    seen = []
    for batch in loader:
        seen.append(batch.pop("number"))  # as scripts do
        clock.now += seconds
    return seen


@pytest.mark.parametrize("workers", [0, 1, 4, 7])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0, 1.2, 4.0])
def test_finds_both_step_times(clock, capsys, workers, share):
    """share: time in which the loader has a batch ready / time of a step without data."""
    loader = SimulatedLoader(clock, workers, seconds=0.1 * share * max(1, workers))
    found = simulate(clock, capsys, loader)
    expected = 100 * (1 + share) if not workers else 100 * max(1, share)
    assert found["step_ms"] == pytest.approx(expected, rel=0.02)
    assert found["accelerator_ms"] == pytest.approx(100)


def simulate(clock, capsys, loader) -> dict:
    """What a run with that loader finds, where a step without data takes 100 ms."""
    for _ in range(2):
        train(clock, measured(loader), 0.1)
    module._loops[id(loader)].report()
    return numbers(capsys.readouterr().out)


def test_batches_that_got_ready_meanwhile_would_hide_the_wait(clock, capsys, monkeypatch):
    """The obvious procedure is wrong: it sees a loader that waited for the training."""
    loaders = [SimulatedLoader(clock, 4, seconds=1.6, prefetch_factor=8) for _ in range(2)]
    found = simulate(clock, capsys, loaders[0])
    assert found["step_ms"] == pytest.approx(400)
    monkeypatch.setattr(module, "deque", lambda batches, maxlen: None)  # it drops nothing
    wrong = simulate(clock, capsys, loaders[1])
    assert wrong["step_ms"] < 0.5 * found["step_ms"]


class SimulatedDataset:
    """Prefetches as tf.data does with AUTOTUNE: twice as much when it was full, and is empty."""

    cardinality = None  # a tf.data.Dataset has it

    def __init__(self, clock, seconds, length=None, holds=1):
        self.clock, self.seconds, self.length, self.holds = clock, seconds, length, holds

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length

    def repeat(self):
        return SimulatedDataset(self.clock, self.seconds)

    def __iter__(self):
        ready, was_full = [self.clock.now + self.seconds], False  # when each batch is
        for number in range(self.length or sys.maxsize):
            if ready[0] > self.clock.now:
                self.holds *= 1 + was_full
                was_full = False
            elif len(ready) == self.holds and ready[-1] <= self.clock.now:
                was_full = True
            self.clock.now = max(self.clock.now, ready[0])
            last = max(ready[-1], self.clock.now)
            del ready[0]
            while len(ready) < self.holds:
                last += self.seconds
                ready.append(last)
            yield {"number": number}


@pytest.mark.parametrize("holds", [1, 30])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0, 1.2, 4.0])
def test_finds_both_step_times_whatever_a_dataset_holds(clock, capsys, share, holds):
    dataset = SimulatedDataset(clock, 0.1 * share, holds=holds)
    loop = measured(dataset)
    for _ in loop:  # it ends by itself, as the buffer would soon hold more than the pauses fill
        clock.now += 0.1
        if loop.reported:
            break
    found = numbers(capsys.readouterr().out)
    assert len(loop.real) == len(loop.repeated) == module.MOST_CYCLES
    assert found["step_ms"] == pytest.approx(100 * max(1, share), rel=0.02)
    assert found["accelerator_ms"] == pytest.approx(100)


def test_no_number_says_what_a_dataset_holds(clock, capsys):
    """Given one, it sees batches that got ready before."""
    dataset = SimulatedDataset(clock, 0.13)
    for _ in itertools.islice(measured(dataset, 200, buffer=2), 300):
        clock.now += 0.1
    assert numbers(capsys.readouterr().out)["step_ms"] < 115 and dataset.holds > 2


def test_an_epoch_of_a_dataset_keeps_its_length(clock):
    """Else ranks, which drop as much as the time allows them, would not end it at the same step."""
    dataset = SimulatedDataset(clock, 0.01, length=60)
    assert [len(train(clock, measured(dataset), 0.1)) for _ in range(3)] == [60] * 3
    assert len(module._loops[id(dataset)].real) > 1


def kinds(clock, loader, seconds: float, epochs: int = 1, **settings) -> list[bool]:
    """Of each step of a run: is its batch the one before, repeated?"""
    seen = [train(clock, measured(loader, **settings), seconds) for _ in range(epochs)]
    assert all(len(epoch) <= len(loader) for epoch in seen)
    return [a == b for epoch in seen for a, b in itertools.pairwise([-1, *epoch])]


def test_all_ranks_change_at_the_same_steps(clock):
    slow = kinds(clock, SimulatedLoader(clock, 4, seconds=1.6), 0.1)
    fast = kinds(clock, SimulatedLoader(clock, 4, seconds=0.1), 0.7)
    assert slow == fast and {*slow} == {True, False}


@pytest.mark.parametrize("accumulation", [1, 3, 16])
def test_stretches_are_whole_updates_and_five_rounds_of_the_workers(clock, accumulation):
    for workers in (0, 1, 4, 7):
        loop = measured(SimulatedLoader(clock, workers, 0.1), accumulation=accumulation)
        assert loop.stretch >= 5 * workers and loop.stretch % accumulation == 0


def test_goes_on_from_epoch_to_epoch_with_no_more_steps_than_batches(clock, capsys):
    """Epochs with room for one stretch: each kind gets its turn."""
    loader = SimulatedLoader(clock, 4, seconds=1.6, length=49)
    repeats = kinds(clock, loader, 0.1, epochs=3)
    assert repeats[:24] == [False] * 24 and sum(repeats) > 24
    assert len(module._loops[id(loader)].real) == 3 and len(module._loops) == 1


def test_its_buffer_is_full_when_repeated_steps_are_timed(clock, monkeypatch):
    """Else the loader would take the training's CPU time."""
    loader, left = SimulatedLoader(clock, 4, seconds=1.6), []
    sample = module._sample

    def look(timed):
        loop = module._loops[id(loader)]
        if len(loop.real) > len(loop.repeated):
            left.append(loader.ready[-1] - clock.now)
        return sample(timed)

    monkeypatch.setattr(module, "_sample", look)
    train(clock, measured(loader), 0.1)
    assert len(left) > 6 and max(left) <= 0


class Pair(namedtuple("Pair", "images labels")):
    def __new__(cls, both):
        return super().__new__(cls, *both)


def test_each_repeated_batch_is_a_fresh_container():
    """Scripts take things out of it."""

    def batch():
        return {"x": [1, {"y": 2}], "pair": Pair([{"z": 3}, 4]), "plain": ({5: 6}, 7)}

    seen = 0
    for got in measured([batch() for _ in range(100)], buffer=0):
        assert got == batch() and type(got["pair"]) is Pair
        got["x"][1].clear(), got["pair"].images.clear(), got["plain"][0].clear(), got.pop("x")
        seen += 1
    assert seen == 100


def test_accelerators_are_waited_for_at_the_ends_of_stretches_only(monkeypatch):
    done, waits = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(done)))
    for _ in measured(range(48), buffer=0):
        done.append(1)
    assert {*waits} == {2, 12, 14, 24, 26, 36, 38, 48}


def test_says_what_is_missing(capsys):
    with pytest.raises(ValueError, match="How many batches this list can hold ready is not known"):
        measured([1, 2, 3])
    with pytest.raises(ValueError, match="How many batches this SimpleNamespace can hold ready"):
        measured(SimpleNamespace(num_workers=8))  # no DataLoader: it has no prefetch_factor
    loop = measured(range(30), buffer=4)
    for _ in loop:
        pass
    capsys.readouterr()
    loop.report()
    loop.report()  # the program ends
    said = capsys.readouterr().out
    assert said == (
        "measured: 30 steps were too few: it takes 3 x 24, in epochs of 24 batches or more\n"
    )


def test_epochs_that_are_too_short_come_as_they_are(clock, capsys):
    loop = measured(SimulatedLoader(clock, 8, seconds=0.1, length=13))
    assert [len(list(loop)) for _ in range(3)] == [13] * 3
    assert capsys.readouterr().out.count("epochs of 13 batches are too short: it takes 66") == 1


def test_one_of_the_ranks_speaks(tmp_path):
    """No variable says which rank it is, as with torch.multiprocessing.spawn."""
    program = (
        "import sys, torch.distributed as dist, measured\n"
        "store, rank = f'file://{sys.argv[1]}', int(sys.argv[2])\n"
        "dist.init_process_group('gloo', init_method=store, rank=rank, world_size=2)\n"
        "for _ in measured.measured(range(9), buffer=0): pass\n"
        "for _ in measured.measured(range(72), buffer=0): pass\n"
        "dist.destroy_process_group()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT / "shared", stdout=-1, text=True)
        for rank in range(2)
    ]
    first, second = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert not second and first.startswith(f"{module.NOTICE}\nmeasured: epochs of 9 ")
    assert numbers(first)["step_ms"] >= 0


def test_only_vcpus_that_the_process_may_use_count(monkeypatch):
    own = os.sched_getaffinity(0)
    *_, ticks = module._sample(None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {min(own)})
    *_, ticks_of_one = module._sample(None)
    assert ticks_of_one == pytest.approx(ticks / len(own), rel=0.05)


# What `docker run --cpus 1.5`, Kubernetes and systemd make of it: the process's cgroups, their
# files (USED is replaced), and how the use is counted there.
LIMITS = {
    "version 2, in a container": (
        "0::/\n",
        {"cpu.max": "150000 100000\n", "cpu.stat": "usage_usec USED\nuser_usec 1\n"},
        1e6,
    ),
    "version 2, of a cgroup above": (
        "0::/a.slice/b.scope\n",
        {
            "a.slice/cpu.max": "150000 100000\n",
            "a.slice/cpu.stat": "usage_usec USED\nuser_usec 1\n",
            "a.slice/b.scope/cpu.max": "max 100000\n",
            "a.slice/b.scope/cpu.stat": "usage_usec 5\nuser_usec 1\n",
        },
        1e6,
    ),
    "version 1, in a container that knows its path on the host": (
        "5:memory:/docker/0a1b\n4:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/docker/0a1b\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "150000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpuacct/cpuacct.usage": "USED\n",
        },
        1e9,
    ),
}
NO_LIMITS = {
    "version 2": ("0::/\n", {"cpu.max": "max 100000\n", "cpu.stat": "usage_usec 7\n"}, 1),
    "as many as there are vCPUs": (
        "0::/\n",
        {"cpu.max": "1600000 100000\n", "cpu.stat": "usage_usec 7\n"},
        1,
    ),
    "version 1": (
        "4:cpu,cpuacct:/\n",
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpuacct/cpuacct.usage": "7\n",
        },
        1,
    ),
}


@pytest.mark.parametrize("case", [*LIMITS, *NO_LIMITS])
def test_a_container_at_its_limit_is_busy(clock, capsys, monkeypatch, tmp_path, case):
    """It may use 1.5 cores of 16, which are 9 %, and does so for 98 % of the time."""
    own, files, per_second = (LIMITS | NO_LIMITS)[case]
    (tmp_path / "own").write_text(own)

    def perf_counter() -> float:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            used = str(int(per_second * 1.5 * 0.98 * clock.now))
            (tmp_path / name).write_text(text.replace("USED", used))
        return clock.now

    clock.perf_counter = perf_counter
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(module, "_machine", lambda: ("ml.g5.4xlarge", 1, "16 vCPUs"))
    train(clock, measured(SimulatedLoader(clock, 0, seconds=0.3), 72), 0.1)
    said = capsys.readouterr().out
    if case in LIMITS:
        assert (
            "CPUs busy     98 %, without data 98 %, on 1.5 cores, its container's limit, of 16 vC"
        ) in said
        assert "verdict       CPU-bound" in said and "clusters      for which instance?" in said
    else:
        assert ", on 16 vCPUs" in said and numbers(said)["instance_type"] == "ml.g5.4xlarge"


@pytest.fixture
def printed(clock, capsys) -> str:
    """What a run prints that says after 72 steps what it has found."""
    loader = SimulatedLoader(clock, 0, seconds=0.3)
    seen = train(clock, measured(loader, 72, **P4D), 0.1)
    assert seen[72:] == list(range(39, 367))  # batches as they are, after 36 and 3 repeated ones
    return capsys.readouterr().out


def test_prints_what_follows_and_three_clusters(printed):
    lines = printed.splitlines()
    assert lines[0] == lines[-2] == module.NOTICE
    assert lines[1:4] == [
        "step time     400.0 ms (400.0 to 400.0 ms)",
        "without data  100.0 ms (100.0 to 100.0 ms)",
        "data costs    75 % of a step",
    ]
    assert re.match(r"CPUs busy     (not known|\d+ %, without data \d+ %), on \d+ vCPUs", lines[4])


def test_advisor_reads_it_from_a_log(printed, capsys, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(f"step 1\n{printed}bye\n")
    text = run(capsys, f"--log {path}")
    assert "Without data a step takes 100.0 ms instead of 400.0: data costs 75 % of it." in text
    assert "Measured in one run on" in text and "1 x ml.p4d.24xlarge" in text
    assert "2 x ml.g5.xlarge, 400.0 ms" in run(
        capsys, f"--log {path} --instance ml.g5.xlarge --count 2"
    )


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ('{"measured": ', "", "has no line of numbers"),
        ('"instance_type": "ml.p4d.24xlarge", ', "", "does not say on which instance type it ran"),
        ('"count": 1, ', "\n", "The line of numbers is not whole"),
        ('"step_ms"', '"step"', "These are not the numbers of measured.py"),
    ],
)
def test_a_log_that_cannot_tell_is_one_clear_sentence(
    printed, capsys, tmp_path, old, new, sentence
):
    assert old in printed
    path = tmp_path / "train.log"
    path.write_text(printed.replace(old, new))
    assert sentence in refusal(capsys, f"--log {path}")


def test_advisor_reads_it_from_a_job(printed, jobs, capsys):
    """The instances are the job's, whatever the script was told."""
    command, one = "python a.py", {"dnn_group": ("ml.g5.xlarge", 1)}
    names = [
        jobs.create({"a.py": f"print({text!r})"}, command, one)
        for text in (printed, printed.replace(prediction.NUMBERS, "lost: "))
    ]
    for name in names:
        jobs.wait(name)
    capsys.readouterr()
    text = run(capsys, f"--job {names[0]}")
    assert (
        f"Job {names[0]}: Measured in one run on" in text and "1 x ml.g5.xlarge, 400.0 ms" in text
    )
    assert "has no result of it" in refusal(capsys, f"--job {names[1]}")
    both = f"--job {names[0]} --synthetic-job {names[1]}"
    assert "has measured both step times" in refusal(capsys, both)


def test_sagemaker_says_the_instances_of_a_homogeneous_job(monkeypatch, tmp_path):
    config = {"current_instance_type": "ml.g5.xlarge", "hosts": ["algo-1", "algo-2"]}
    monkeypatch.setenv("SM_INPUT_CONFIG_DIR", str(tmp_path))
    for groups, expected in ((1, ("ml.g5.xlarge", 2)), (2, ("", 1))):
        config["instance_groups"] = [{}] * groups
        (tmp_path / "resourceconfig.json").write_text(json.dumps(config))
        assert module._machine()[:2] == expected
    local = json.dumps({**config, "current_instance_type": "local_gpu"})
    for text in ("{", "[]", '{"hosts": null}', local):  # not what SageMaker writes
        (tmp_path / "resourceconfig.json").write_text(text)
        assert module._machine()[:2] == ("", 1)


def test_prints_when_the_program_ends():
    script = "from measured import measured\nfor _ in measured(range(72), buffer=0): pass"
    command, folder = [sys.executable, "-c", script], ROOT / "shared"
    said = subprocess.check_output(command, cwd=folder, text=True)  # as a copy: without the rest
    assert numbers(said)["step_ms"] > 0


def test_ec2_says_the_instance_type(monkeypatch):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.answer("a token" * (self.path == "/latest/api/token"))

        def do_GET(self) -> None:
            allowed = self.headers["X-aws-ec2-metadata-token"] == "a token"
            self.answer("g5.xlarge" * allowed)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", place)
        assert module._machine()[:2] == ("ml.g5.xlarge", 1)
        monkeypatch.setenv("WORLD_SIZE", "32")  # as torchrun says it on each of four hosts
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert module._machine()[:2] == ("ml.g5.xlarge", 4)
        server.shutdown()


# --- In real time, where time.sleep stands for work: other programs take none of it. ---

# The loop is that of PyTorch's official example, mnist/main.py.
MNIST = """
import time
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

class Digits(Dataset):
    def __init__(self, batches, seconds):
        self.batches, self.seconds = batches, seconds
    def __len__(self):
        return 8 * self.batches
    def __getitem__(self, index):
        time.sleep(self.seconds / 8)
        return torch.full((1, 28, 28), index / len(self)), index % 10

class Net(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.fc, self.seconds = nn.Linear(28 * 28, 10), seconds
    def forward(self, x):
        time.sleep(self.seconds)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)

def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]")
"""


def train_mnist(script: str, loader, seconds: float) -> float:
    """Run the script's loop, and return its step time in ms, without the first steps."""
    names = {"measured": measured}
    exec(script, names)
    model, ends = names["Net"](seconds), []
    optimizer = torch.optim.Adadelta(model.parameters())
    optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    args = SimpleNamespace(log_interval=10)
    names["train"](args, model, torch.device("cpu"), loader, optimizer, 1)
    return 1000 * (ends[-1] - ends[9]) / (len(ends) - 10)


class OneBatch:
    """A loader that gives its first batch again and again."""

    def __init__(self, loader):
        self.dataset, self.batches = loader.dataset, [next(iter(loader))] * 30

    def __iter__(self):
        return iter(self.batches)


def close(found: dict, step_ms: float, floor_ms: float) -> bool:
    """Do they differ by less than 10 %?"""
    print(f"{found['step_ms']:.1f} {step_ms:.1f} {found['accelerator_ms']:.1f} {floor_ms:.1f}")
    return [found["step_ms"], found["accelerator_ms"]] == pytest.approx(
        [step_ms, floor_ms], rel=0.1
    )


@pytest.mark.parametrize(
    "workers, data, step",
    [(0, 0.02, 0.02), (2, 0.06, 0.015), (2, 0.02, 0.03), (2, 0.06, 0.03)],
    ids=["no workers", "loader is the limit", "loader is not the limit", "border"],
)
def test_pytorch_script_as_two_jobs_find_it(capsys, workers, data, step):
    names: dict = {}
    exec(MNIST, names)

    def loader(batches: int):
        digits = names["Digits"](batches, data)
        return torch.utils.data.DataLoader(digits, batch_size=8, num_workers=workers)

    with_one_line = MNIST.replace(
        "enumerate(train_loader)", "enumerate(measured(train_loader, 72))"
    )
    assert with_one_line != MNIST
    for _ in range(8):  # a machine may be too busy even for that, now and then
        train_mnist(with_one_line, loader(75), step)
        found = numbers(capsys.readouterr().out)
        step_ms = train_mnist(MNIST, loader(40), step)
        if close(found, step_ms, train_mnist(MNIST, OneBatch(loader(1)), step)):
            return
    pytest.fail(capsys.readouterr().out)


def pipeline(data: float, kind: str):
    """A tf.data.Dataset that makes a batch in so many seconds."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing  # its sleep takes no CPU time

    dataset = tf.data.Dataset.from_tensors([1.0]).repeat()
    if kind == "parallel":  # up to four at a time, as cores allow

        def slowly(x):
            time.sleep(4 * data)
            return x

        function = functools.partial(tf.numpy_function, slowly, Tout=tf.float32)
        return dataset.map(lambda x: function([x]), num_parallel_calls=4).prefetch(1)
    return dataset.apply(testing.sleep(int(1e6 * data))).prefetch(tf.data.AUTOTUNE)


@pytest.mark.parametrize(
    "data, step, kind", [(0.03, 0.015, ""), (0.02, 0.012, "parallel"), (0.005, 0.03, "")]
)
def test_tensorflow_loop_as_two_jobs_find_it(capsys, data, step, kind):
    def step_ms(batches) -> float:
        ends = []
        for _ in batches:
            time.sleep(step)
            ends.append(time.perf_counter())
        return 1000 * (ends[-1] - ends[19]) / (len(ends) - 20)

    for _ in range(8):  # a machine may be too busy even for that, now and then
        loop = measured(pipeline(data, kind), 144)
        for _ in loop:
            time.sleep(step)
            if loop.reported:
                break
        found = numbers(capsys.readouterr().out)
        plain, one = pipeline(data, kind), pipeline(data, kind).take(1).cache().repeat()
        if close(found, step_ms(plain.take(60)), step_ms(one.take(60))):
            return
    pytest.fail(capsys.readouterr().out)


@pytest.mark.parametrize("data, step", [(0.04, 0.015), (0.005, 0.03)])
def test_keras_fit_as_two_jobs_find_it(capsys, data, step):
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing  # its sleep takes no CPU time

    dataset = tf.data.Dataset.from_tensors(([[1.0, 2.0]], [[3.0]])).repeat()
    dataset = dataset.apply(testing.sleep(int(1e6 * data))).prefetch(2)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(loss="mse")
    work = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, logs: time.sleep(step))

    def step_ms(dataset) -> float:
        ends = []
        look = tf.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, logs: ends.append(time.perf_counter())
        )
        model.fit(dataset, steps_per_epoch=40, callbacks=[work, look], verbose=0)
        return 1000 * (ends[-1] - ends[9]) / (len(ends) - 10)

    for _ in range(8):
        module.measured_fit(model, dataset, callbacks=[work], verbose=0)
        found = numbers(capsys.readouterr().out)
        if close(found, step_ms(dataset), step_ms(dataset.take(1).cache().repeat())):
            return
    pytest.fail(capsys.readouterr().out)


def test_keras_fit_of_a_python_dataset_and_of_arrays(capsys):
    """A PyDataset prepares batches where fit asks for them."""
    import numpy as np
    import tensorflow as tf

    class Slow(tf.keras.utils.PyDataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> tuple:
            time.sleep(0.04)
            return np.ones((2, 2), "float32"), np.ones((2, 1), "float32")

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(loss="mse")
    work = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, logs: time.sleep(0.02))
    module.measured_fit(model, Slow(), callbacks=[work], verbose=0)
    found = numbers(capsys.readouterr().out)
    assert 38 < found["step_ms"] < 90 and 20 < found["accelerator_ms"] < 38  # it prefetches
    with pytest.raises(TypeError, match=r"measured_fit\(ndarray\).*arrays are prepared already"):
        module.measured_fit(model, np.ones((2, 2)))
