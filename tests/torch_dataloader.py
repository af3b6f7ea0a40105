"""Run torch's own tests of its DataLoader with RemoteDataset around each Dataset.

    python tests/torch_dataloader.py FILE [-k EXPRESSION ...]

FILE is test/stateful_dataloader/test_dataloader.py of https://github.com/pytorch/data, which needs
the package expecttest. They run with the plain DataLoader, and with two data hosts, which takes a
quarter of an hour or more. The tests that pass only with the plain one are printed. Options after
FILE are pytest's.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pt.grpc.sagemaker" / "code"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.data_hosts import PATHS, DataHost, environment_of, up

IMPORT = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader\n"
LOADERS = {
    "plain": "from torch.utils.data import DataLoader\n",
    "two data hosts": """
from typing import Generic, TypeVar
import torch.utils.data
from feed import RemoteDataset

T = TypeVar("T")

class DataLoader(torch.utils.data.DataLoader, Generic[T]):
    def __init__(self, dataset, *arguments, **options):
        super().__init__(RemoteDataset(dataset), *arguments, **options)
""",
}
# What differs, by a part of the test's name.
EXPECTED = {
    "iterdatapipe": "torch's datapipes are refused",
    "worker_init_fn": "each sample has a seed of its own, also after a worker_init_fn has set one",
    "worker_seed": "a multiprocessing.Value, which the workers share, cannot be sent",
    "indexing_type": "the Dataset refers to its unittest.TestCase, which cannot be pickled",
    "order_index_ds": "get_worker_info().id is the number of a data host's process",
    "test_segfault": "it is a process of a data host that dies, and the error says that",
}


def outcomes(text: str, folder: Path, environment: dict, options: list[str]) -> dict[str, str]:
    """Run the tests; return the message of each that did not pass, or an empty string."""
    (folder / "torch_tests.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:nbval", "--timeout=600", *options]
    with open(folder / "output", "w") as output:
        command += ["--junitxml=found.xml", "torch_tests.py"]
        subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output)
    found = {}
    for case in xml.etree.ElementTree.parse(folder / "found.xml").iter("testcase"):
        name = f"{case.get('classname').rpartition('.')[2]}.{case.get('name')}"
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        found[name] = problems[0].get("message", "failed") if problems else ""
    return found


def main() -> None:
    """Run the tests in both ways, and print the difference."""
    source, options, found = Path(sys.argv[1]).read_text(), sys.argv[2:], {}
    assert IMPORT in source, f"{sys.argv[1]} does not import {IMPORT.split()[-1]} as expected"
    source = source.replace("JOIN_TIMEOUT = 60.0", "JOIN_TIMEOUT = 200.0")  # a host starts slowly
    for name, loader in LOADERS.items():
        with tempfile.TemporaryDirectory() as given:
            folder, hosts = Path(given), []
            paths = {"PYTHONPATH": f"{PATHS}:{folder}:{os.environ.get('PYTHONPATH', '')}"}
            environment = os.environ | paths
            if name != "plain":
                hosts = [
                    DataHost(2, folder=folder, environment=paths, is_program=True) for _ in range(2)
                ]
                environment = environment_of(up(*hosts)) | paths
            try:
                text = source.replace(IMPORT, loader)
                found[name] = outcomes(text, folder, environment, options)
                print((folder / "output").read_text())
            finally:
                for host in hosts:
                    host.kill()
    plain, remote = found.values()
    passed = {name for name, problem in plain.items() if not problem}
    failed = {name for name in passed if remote.get(name, "not run")}
    print(f"{len(plain)} tests; {len(passed)} pass with the plain DataLoader, and of these")
    print(f"{len(passed) - len(failed)} with two data hosts. The others:")
    for name in sorted(failed):
        reasons = [reason for part, reason in EXPECTED.items() if part in name]
        text = " ".join(remote.get(name, "not run").split())[:300]
        print(f"{name}: {reasons[0] if reasons else f'NOT EXPECTED: {text}'}")


if __name__ == "__main__":
    main()
