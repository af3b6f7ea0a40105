#!/usr/bin/env bash
# Set up .venv: requirements.txt, the SageMaker training toolkit, and SDK v2. Nothing is compiled.
#
# `make` runs this when .venv is missing, unfinished or older than the requirements. It can be run
# again at any time and continues where it stopped. Details of each step go to build/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
log=build/setup.log
unfinished=.venv/.unfinished # pip can leave half a package behind: then start again from nothing

fail() {
    echo "Set-up stopped: $*" >&2
    exit 1
}

# step WHAT COMMAND...: run the command into the log and show what happens in one line. Functions
# given as commands chain with &&, because bash ignores `set -e` in a condition.
step() {
    local what=$1 started=$SECONDS
    shift
    printf '  %s ... ' "$what"
    if ("$@") >>"$log" 2>&1; then
        echo "$((SECONDS - started)) s"
    else
        echo "failed; the end of $log:" >&2
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

install_packages() {
    touch "$unfinished" && "$python" -m pip install -r requirements.txt && rm "$unfinished"
}

# The toolkit, with which AWS's containers start jobs, and what it needs that is not installed already.
# Its C code, which MPI preloads on AWS, is left out: `true` takes the compiler's place, an empty
# module that of its result; and nothing of that may go into pip's cache.
install_toolkit() {
    CC=true "$python" -m pip install --no-cache-dir --no-deps sagemaker-training==5.1.4 \
        retrying==1.4.2 inotify_simple==2.0.1 &&
        touch "$(echo .venv/lib/python*/site-packages)/gethostname.py" &&
        "$python" -c 'import sagemaker_training.trainer'
}

# The last SDK v2, for the test that the example works with it too; in a folder of its own, because
# it is the same package as SDK v3, whose dependencies serve.
install_sdk_v2() {
    "$python" -m pip install --no-deps --upgrade --target .venv/sdk-v2 \
        sagemaker==2.257.7 sagemaker-core==1.0.78
}

[ "$(uname -s)" = Linux ] ||
    fail "the examples run on Linux only; on Windows use WSL, on macOS a Linux container."
if [ -e "$unfinished" ] || ! is_supported "$python" || ! "$python" -m pip --version >/dev/null; then
    base=$(find_python) ||
        fail "no Python 3.11, 3.12 or 3.13 with its venv module found: install one (Debian, Ubuntu:" \
            "apt install python3-venv), or install uv, which fetches it."
fi

trap 'echo; fail "interrupted; the same command continues it."' INT TERM
mkdir -p build
: >"$log"
echo "Setting up .venv (once; about 4 minutes on two cores):"
[ -z "${base:-}" ] || step "Python ($base)" create_venv
step "packages of requirements.txt" install_packages
step "SageMaker training toolkit" install_toolkit
step "SageMaker SDK v2" install_sdk_v2
