#!/usr/bin/env bash
# Set up .venv: requirements.txt, the SageMaker training toolkit, and SDK v2. No compiler is needed.
#
# `make` runs this when .venv is missing, unfinished or older than the requirements. It can be run
# again at any time and continues where it stopped. Details of each step go to build/setup.log. The
# stamp .venv/.ready is written last, when nothing is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
uv=.venv/bin/uv
torch= # uv's option that chooses its build
log=build/setup.log
missing=.venv/.missing # a line for each package that could not be had
unfinished=.venv/.unfinished # an installer can leave half a package behind: then start again from nothing

fail() {
    echo "Set-up stopped: $*" >&2
    exit 1
}

# step WHAT COMMAND...: run the command, with its output in the log; show what is large to download,
# and how long it took. Functions given as commands chain with &&: bash ignores `set -e` here.
step() {
    local what=$1 started=$SECONDS
    shift
    echo "  $what"
    if ("$@") 2>&1 | tee -a "$log" | sed -nu 's/^Downloading .*([0-9.]*\([0-9][0-9]\..*M\|G\)iB)/    &/p'; then
        echo "    $((SECONDS - started)) s"
    else
        echo "    failed; the end of $log:" >&2
        tail -n 15 "$log" >&2
        fail "could not install $what."
    fi
}

# A command can exist and not run (pyenv's shims), or lack the venv module (Debian's python3).
is_supported() {
    "$1" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null
}

find_python() {
    for name in python3 python3.13 python3.12 python3.11; do
        is_supported "$name" && echo "$name" && return
    done
    command -v uv >/dev/null && echo uv
}

create_venv() {
    rm -rf .venv/bin .venv # bin first: what an interrupted removal leaves must not look usable
    if [ "$base" != uv ]; then
        "$base" -m venv .venv
    else
        uv venv --seed --python 3.13 .venv
    fi
}

# pip_setting NAME: what pip has been told, by variables first. uv does not read it.
pip_setting() {
    "$python" -m pip config list | sed -n "s/\\\\n/ /g; s/^[^ ]*\.$1='\(.*\)'$/\1/p" | head -n 1
}

# uv takes packages from where pip would, and without its cache where that cannot be written.
tell_uv() {
    local index more links certificate
    index=$(pip_setting index-url) && more=$(pip_setting extra-index-url)
    links=$(pip_setting find-links) && certificate=$(pip_setting cert)
    export UV_INDEX_STRATEGY=unsafe-best-match UV_PYTHON=$python
    [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
    [ -z "$more" ] || export UV_INDEX=$more
    [ -z "$links" ] || export UV_FIND_LINKS=${links// /,}
    [ -z "$certificate" ] || export SSL_CERT_FILE=$certificate
    mkdir -p "${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv}" 2>/dev/null || export UV_NO_CACHE=1
}

# need GIGABYTES: stop before the download if the disk has less, with what .venv already takes. That is
# .venv and a GB or two for what else is written: on a full disk Studio's JupyterLab may not start.
need() {
    local free held
    free=$(df -Pm . | awk 'NR == 2 { print $4 }') held=$(du -sm .venv | cut -f 1)
    [ $((free + held)) -ge $(($1 * 1024)) ] ||
        fail "the disk has $free MB free, and $1 GB are needed. Delete something, or make the disk" \
            "larger (in SageMaker Studio: stop the space, and give it 15 GB of storage). Then run the" \
            "same command again."
}

# The CPU build of PyTorch, except where a GPU is. Only PyTorch's own index has it, or a place that
# pip's settings name.
choose_torch() {
    local dry_run=("$uv" pip install --dry-run --reinstall)
    local cuda="about 1.7 GB to download, 7 GB on disk" cpu="about 0.8 GB to download, 3.2 GB on disk"
    if nvidia-smi >/dev/null 2>&1; then
        echo "  PyTorch: the build with CUDA, as there is a GPU: $cuda"
        need 9
    elif UV_HTTP_RETRIES=0 "${dry_run[@]}" --no-deps --torch-backend=cpu torch >>"$log" 2>&1; then
        echo "  PyTorch: the CPU build; $cpu"
        torch=--torch-backend=cpu
        need 5
    elif "${dry_run[@]}" -c constraints.txt torch 2>&1 | grep " nvidia-" >/dev/null; then
        echo "  PyTorch: its index of CPU builds is out of reach, so the build with CUDA comes: $cuda"
        need 9
    else
        echo "  PyTorch: the build without CUDA that pip's settings lead to; $cpu"
        need 5
    fi
}

# All packages; or if one cannot be had, those that can: what does not need it runs.
install_packages() {
    touch "$unfinished"
    rm -f "$missing"
    "$uv" pip install $torch -r requirements.txt || install_one_by_one || return 1
    # Bytecode now: sagemaker's, because the first notebook would show what Python warns of in it, and
    # that of the largest, because processes that start together would each make it.
    local packages
    packages=$(echo .venv/lib/python*/site-packages)
    "$python" -m compileall -qq -j 0 "$packages"/{sagemaker,torch,tensorflow,keras} || true # one may be missing
    rm "$unfinished"
}

install_one_by_one() {
    local requirement output
    "$uv" pip install sagemaker -c constraints.txt || return 1 # which everything needs
    sed 's/ *#.*//; /^-c/d; /^$/d' requirements.txt | while read -r requirement; do
        output=$("$uv" pip install $torch -c constraints.txt "$requirement" 2>&1) ||
            echo "$requirement: $(tail -n 1 <<<"$output" | sed 's/^ *//')" >>"$missing"
        echo "$output"
    done
}

# The toolkit, with which AWS's containers start jobs, and what it needs that is not installed already.
# Its C code, which MPI preloads on AWS, is left out: `true` takes the compiler's place, an empty
# module that of its result; and nothing of that may go into uv's cache. Importing it makes folders.
install_toolkit() {
    CC=true "$uv" pip install --no-cache --no-deps sagemaker-training==5.1.4 \
        retrying==1.4.2 inotify_simple==2.0.1 &&
        touch "$(echo .venv/lib/python*/site-packages)/gethostname.py" &&
        SAGEMAKER_BASE_DIR=$(mktemp -d) "$python" -c 'import sagemaker_training.trainer'
}

# The last SDK v2, for the test that the example works with it too; in a folder of its own, because
# it is the same package as SDK v3, whose dependencies serve.
install_sdk_v2() {
    "$uv" pip install --no-deps --upgrade --target .venv/sdk-v2 \
        sagemaker==2.257.7 sagemaker-core==1.0.78
}

[ "$(uname -s)" = Linux ] ||
    fail "the examples run on Linux only; on Windows use WSL, on macOS a Linux container."
if [ -e "$unfinished" ] || ! is_supported "$python" || ! "$python" -m pip --version >/dev/null; then
    base=$(find_python) ||
        fail "no Python 3.11, 3.12 or 3.13 with its venv module found: install one (Debian, Ubuntu:" \
            "apt install python3-venv), or install uv, which fetches it."
fi

export PIP_USER=0 # which Studio's users set, and pip refuses in a venv
trap 'echo; fail "interrupted; the same command continues it."' INT TERM
mkdir -p build
: >"$log"
echo "Setting up .venv (once; about a minute, and as long as the downloads take):"
[ -z "${base:-}" ] || step "Python ($base)" create_venv
step "uv, which installs the rest" "$python" -m pip install -q uv==0.13.9
tell_uv
choose_torch
step "packages of requirements.txt" install_packages
step "SageMaker training toolkit" install_toolkit
step "SageMaker SDK v2" install_sdk_v2
if [ -e "$missing" ]; then
    echo "These packages could not be had (more in $log); the same command tries again," \
        "and what does not need them runs:" >&2
    cat "$missing" >&2
else
    touch .venv/.ready
fi
