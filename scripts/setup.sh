#!/usr/bin/env bash
# Set up .venv: requirements.txt, the SageMaker training toolkit, and SDK v2. No compiler is needed.
#
# `make` runs this when .venv is missing, unfinished or older than the requirements. You can run it
# again at any time; it continues where it stopped. The output of each step goes to build/setup.log.
# When everything has been installed, it writes the stamp .venv/.ready. PYTHON=python3.12 chooses the
# Python of a new environment; otherwise it is python3, or the newest that is supported.
set -euo pipefail
cd "$(dirname "$0")/.."

supported="3.11 3.12 3.13"
python=.venv/bin/python
uv=.venv/bin/uv
torch= # uv's option for the PyTorch build
log=build/setup.log
missing=.venv/.missing # a line for each package that could not be installed
unfinished=.venv/.unfinished # marks that half a package may be installed: then start from scratch

fail() {
    echo "Set-up stopped: $*" >&2
    exit 1
}

# step WHAT COMMAND...: run the command and log its output. Print large downloads and the time.
# bash ignores `set -e` in functions that are run this way, so they chain commands with &&.
step() {
    local what=$1 started=$SECONDS
    shift
    echo "  $what"
    if ("$@") 2>&1 | tee -a "$log" | sed -nu 's/^Downloading .*([0-9.]*\([0-9][0-9]\..*M\|G\)iB)/    &/p'; then
        echo "    $((SECONDS - started)) s"
    else
        echo "    failed. The end of $log:" >&2
        tail -n 15 "$log" >&2
        fail "could not install $what."
    fi
}

# A command may exist but not run (pyenv's shims), or lack the venv module (Debian's python3).
is_supported() {
    local version
    version=$("$1" -c 'import ensurepip, sys; print("{}.{}".format(*sys.version_info))' 2>/dev/null)
    [[ " $supported " == *" $version "* ]]
}

find_python() {
    local name version
    for name in ${PYTHON:-python3 $(printf 'python%s\n' $supported | sort -rV)}; do
        is_supported "$name" && echo "$name" && return
    done
    [ -z "${PYTHON:-}" ] && command -v uv >/dev/null && echo uv
}

# Say so if the Python that is there is newer than the supported ones.
too_new() {
    local minor
    minor=$("${PYTHON:-python3}" -c 'import sys; print(sys.version_info[1])' 2>/dev/null) || return 0
    [ "$minor" -le "${supported##*.}" ] ||
        echo " (3.$minor is too new: there is no package of the pinned TensorFlow for it)"
}

create_venv() {
    rm -rf .venv/bin .venv # bin first: after an interrupted removal, .venv must not look usable
    if [ "$base" != uv ]; then
        "$base" -m venv .venv
    else
        uv venv --seed --python "${supported##* }" .venv
    fi
}

# pip_setting NAME: print a setting of pip, which uv does not read. Variables come first.
pip_setting() {
    "$python" -m pip config list | sed -n "s/\\\\n/ /g; s/^[^ ]*\.$1='\(.*\)'$/\1/p" | head -n 1
}

# Make uv use pip's package sources, and no cache if its folder cannot be created.
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

# need GIGABYTES: stop before the download if the disk has less free, counting what .venv already
# takes. The limits leave a GB or two for other files: on a full disk Studio's JupyterLab may not start.
need() {
    local free held
    free=$(df -Pm .venv/ | awk 'NR == 2 { print $4 }') held=$(du -sm .venv/ 2>>"$log" | cut -f 1) || true
    [ $((free + held)) -ge $(($1 * 1024)) ] ||
        fail "the disk has $free MB free, and $1 GB are needed. Delete something, or make the disk" \
            "larger (in SageMaker Studio: stop the space, and give it 15 GB of storage). Then run the" \
            "same command again."
}

# Choose PyTorch's CPU build unless there is a GPU. It comes from PyTorch's own index, or from a
# source that pip's settings name.
choose_torch() {
    local dry_run=("$uv" pip install --color never --dry-run --reinstall) found
    local cuda="about 1.7 GB to download, 7 GB on disk" cpu="about 0.8 GB to download, 3.2 GB on disk"
    if nvidia-smi >/dev/null 2>&1; then
        echo "  PyTorch: the CUDA build, since there is a GPU; $cuda"
        need 9
    elif UV_HTTP_RETRIES=0 "${dry_run[@]}" --no-deps --torch-backend=cpu torch >>"$log" 2>&1; then
        echo "  PyTorch: the CPU build; $cpu"
        torch=--torch-backend=cpu
        need 5
    elif ! found=$("${dry_run[@]}" -c constraints.txt torch 2>&1); then
        echo "$found" >>"$log" # the installation will say what is wrong
    elif grep -q " nvidia-" <<<"$found"; then
        echo "  PyTorch: the CUDA build, because the index of CPU builds cannot be reached; $cuda"
        need 9
    else
        echo "  PyTorch: the CPU build of pip's package source; $cpu"
        need 5
    fi
}

# Install all packages. If one cannot be installed, install the others: much runs without it.
install_packages() {
    touch "$unfinished"
    rm -f "$missing"
    "$uv" pip install $torch -r requirements.txt || install_one_by_one || return 1
    # Compile bytecode now: of sagemaker, because otherwise the first notebook shows the compiler's
    # warnings; of the largest packages, because processes that start together would each do it.
    local packages
    packages=$(echo .venv/lib/python*/site-packages)
    "$python" -m compileall -qq -j 0 "$packages"/{sagemaker,torch,tensorflow,keras} || true # one may be missing
    rm "$unfinished"
}

install_one_by_one() {
    local requirement output
    "$uv" pip install sagemaker -c constraints.txt || return 1 # everything needs it
    sed 's/ *#.*//; /^-c/d; /^$/d' requirements.txt | while read -r requirement; do
        output=$("$uv" pip install $torch -c constraints.txt "$requirement" 2>&1) ||
            echo "$requirement: $(tail -n 1 <<<"$output" | sed 's/^ *//')" >>"$missing"
        echo "$output"
    done
}

# Install the toolkit that starts jobs in AWS's containers, and its missing dependencies. Skip its C
# code, which MPI preloads on AWS: `true` replaces the compiler, and an empty module replaces the
# result. Keep this out of uv's cache. Importing the toolkit creates folders: use a temporary one.
install_toolkit() {
    CC=true "$uv" pip install --no-cache --no-deps sagemaker-training==5.1.4 \
        retrying==1.4.2 inotify_simple==2.0.1 &&
        touch "$(echo .venv/lib/python*/site-packages)/gethostname.py" &&
        SAGEMAKER_BASE_DIR=$(mktemp -d) "$python" -c 'import sagemaker_training.trainer'
}

# Install the last SDK v2, for the test that the example works with it too. It gets its own folder,
# because SDK v3 is the same package, and uses SDK v3's dependencies.
install_sdk_v2() {
    "$uv" pip install --no-deps --upgrade --target .venv/sdk-v2 \
        sagemaker==2.257.7 sagemaker-core==1.0.78
}

[ "$(uname -s)" = Linux ] ||
    fail "the examples run on Linux only. On Windows, use WSL; on macOS, use a Linux container."
if [ -e "$unfinished" ] || ! is_supported "$python" || ! "$python" -m pip --version >/dev/null; then
    most=${supported% *}
    base=$(find_python) ||
        fail "found no Python ${most// /, } or ${supported##* } with the venv module$(too_new)." \
            "Install one (on Debian or Ubuntu: apt install python3-venv), or install uv, which" \
            "downloads Python."
fi

export PIP_USER=0 # Studio's users may set it to 1, which pip refuses in a virtual environment
trap 'echo; fail "interrupted. Run the same command again to continue."' INT TERM
mkdir -p build
: >"$log"
echo "Setting up .venv (only once; takes about a minute, plus the downloads):"
[ -z "${base:-}" ] || step "Python ($base)" create_venv
step "uv" "$python" -m pip install -q uv==0.13.9
tell_uv
choose_torch
step "packages of requirements.txt" install_packages
step "SageMaker training toolkit" install_toolkit
step "SageMaker SDK v2" install_sdk_v2
if [ -e "$missing" ]; then
    echo "These packages could not be installed (see $log). Run the same command to try again." \
        "Everything that does not need them works:" >&2
    cat "$missing" >&2
else
    touch .venv/.ready
fi
