"""Runs the set-up's lines for SageMaker Studio, and hello world, in a replica of Studio's image.

`make containers` builds the environment and calls run.sh. studio.txt lists the packages that the
image has; its variables, user and folders are here, from the same Dockerfile.

Not tested: JupyterLab's page and the service behind it, AWS, and the other packages of the image.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from container import mount

from helpers.pages import ROOT, copy_repository

pytestmark = pytest.mark.timeout(900)  # the first test that needs the kernel waits for the set-up

IMAGE = ROOT / ".containers" / "studio"
CONDA, HOME = Path("/opt/conda"), Path("/home/sagemaker-user")
EXAMPLES = HOME / "examples"
USER, GROUP = 1000, 100
METADATA = Path("/opt/ml/metadata/resource-metadata.json")
VARIABLES = {
    "HOME": str(HOME),
    "USER": "sagemaker-user",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PATH": f"{CONDA}/bin:{CONDA}/condabin:/usr/local/bin:/usr/bin:/bin:{HOME}/.local/bin",
    "OPENSSL_MODULES": f"{CONDA}/lib64/ossl-modules/",
    # What activating the environment sets, before JupyterLab starts.
    "MAMBA_ROOT_PREFIX": str(CONDA),
    "CONDA_PREFIX": str(CONDA),
    "CONDA_DEFAULT_ENV": "base",
    # What the service adds: another region than the local SageMaker's, and a role's credentials.
    "SAGEMAKER_APP_TYPE": "JupyterLab",
    "AWS_REGION": "eu-west-1",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/role",
    # Not the image's: what people set there so that packages outlive the space's instance.
    "PIP_USER": "1",
}
# This machine's variables stay, such as those of its package index, but not what a test run sets.
OURS = ("PYTHON", "PYTEST", "PYENV", "VIRTUAL_ENV", "IPYTHON", "JUPYTER", "XDG_", "MAKE", "MFLAGS")
EXECUTE = "python -m nbconvert --execute --to notebook --stdout --ExecutePreprocessor.kernel_name="
HELLO = "hello.world.sagemaker/helloworld-example.ipynb"
[SECTION] = re.findall(
    r"## In SageMaker Studio, or without make\n(.*)", (ROOT / "docs/setup.md").read_text(), re.S
)
LINES = re.findall(r"^    (.+)$", SECTION, re.M)


def as_user(command: str) -> subprocess.CompletedProcess:
    """Run a command in JupyterLab's terminal."""
    machine = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return subprocess.run(
        ["bash", "-ec", command],
        cwd=EXAMPLES,
        env=machine | VARIABLES,
        user=USER,
        group=GROUP,
        extra_groups=[],
        umask=0o022,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A new JupyterLab space: the image, a home folder of 5 GB, and in it a clone of ours."""
    for folder in (CONDA, HOME, METADATA.parent):
        folder.mkdir(parents=True, exist_ok=True)
    METADATA.write_text('{"AppType": "JupyterLab", "DomainId": "d-1", "SpaceName": "examples"}')
    mount("--bind", str(IMAGE), str(CONDA))
    mount("-t", "tmpfs", "-o", "size=5g,mode=755", "home", str(HOME))
    users = tmp_path_factory.mktemp("etc") / "passwd"
    users.write_text(f"root:x:0:0::/root:/bin/bash\nsagemaker-user:x:{USER}:{GROUP}::{HOME}:\n")
    mount("--bind", str(users), "/etc/passwd")
    copy_repository(EXAMPLES)
    pip = Path(".config/pip/pip.conf")  # which may name this machine's package index, too
    if (Path.home() / pip).exists():
        (HOME / pip).parent.mkdir(parents=True)
        shutil.copy(Path.home() / pip, HOME / pip)
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        subprocess.run(["chown", "-R", f"{USER}:{GROUP}", HOME, temporary], check=True)
        patch.setenv("TMPDIR", temporary)
        yield


@pytest.fixture(scope="module")
def kernel() -> str:
    """What the lines of docs/setup.md print when they make the kernel, in a larger space."""
    mount("-o", "remount,size=15g", str(HOME))
    done = as_user("\n".join(LINES))
    assert done.returncode == 0, done.stdout + done.stderr
    return f"{done.stdout}{shutil.disk_usage(HOME).used / 1e9:.1f} GB in the space's home folder"


def test_a_new_space_is_too_small_and_the_set_up_says_so_before_the_download():
    done = as_user(LINES[0])
    assert done.returncode == 1
    assert re.search(r"the disk has \d+ MB free, .* give it 15 GB of storage", done.stderr)
    assert shutil.disk_usage(HOME).used < 200e6


def test_hello_world_runs_in_the_kernel_that_the_lines_make(
    kernel: str, capsys: pytest.CaptureFixture
):
    with capsys.disabled():
        print(f"\n{kernel}")
    done = as_user(f"{EXECUTE}heterogeneous {HELLO}")
    assert done.returncode == 0, done.stderr
    cells = nbformat.reads(done.stdout, as_version=4).cells
    printed = [output.get("text", "") for cell in cells for output in cell.get("outputs", [])]
    assert len(re.findall(r"Completed, \d+ s billed", "".join(printed))) == 3, printed


def test_the_images_own_kernel_lacks_a_package_and_names_it(kernel: str):
    done = as_user(f"{EXECUTE}python3 {HELLO}")
    assert done.returncode == 1
    assert "from shared import local_sagemaker" in done.stderr  # the first cell's
    assert done.stderr.rstrip().endswith("No module named 'moto'")
