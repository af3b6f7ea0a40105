#!/usr/bin/env bash
# Set up .venv: Python 3.11, requirements.txt, Horovod and the SageMaker training toolkit.
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

# A command can exist and not run (pyenv's shims), or lack the venv module (Debian's python3.11).
is_python311() {
    "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

create_venv() {
    rm -rf .venv/bin .venv # bin first: what an interrupted removal leaves must not look usable
    if is_python311 python3.11; then
        python3.11 -m venv .venv
    elif is_python311 python3; then
        python3 -m venv .venv
    else
        uv venv --seed --python 3.11 .venv
    fi
}

install_packages() {
    touch "$unfinished" &&
        "$python" -m pip install -r requirements.txt setuptools wheel cmake &&
        rm "$unfinished"
}

# Horovod is compiled against the TensorFlow that is installed, so pip must not take a wheel that it
# built earlier for another one.
install_horovod() {
    "$python" -c 'import horovod.tensorflow' && return
    PATH="$PWD/.venv/bin:$PATH" \
        HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
        "$python" -m pip install --no-cache-dir --no-build-isolation --force-reinstall --no-deps \
        horovod==0.28.1
}

# The toolkit asks for protobuf >= 5.28, which TensorFlow 2.15 excludes. What we use of it, the start
# of a job in AWS's containers, needs no protobuf, and of what is not installed already only these two.
install_toolkit() {
    "$python" -m pip install --no-deps sagemaker-training==5.1.4 retrying==1.4.2 \
        inotify_simple==2.0.1 &&
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
command -v "${CXX:-c++}" >/dev/null ||
    fail "no C++ compiler, which Horovod needs: install one (Debian, Ubuntu: apt install g++)."
if [ -e "$unfinished" ] || ! is_python311 "$python" || ! "$python" -m pip --version >/dev/null; then
    is_python311 python3.11 || is_python311 python3 || command -v uv >/dev/null ||
        fail "no Python 3.11 found: install it with its venv module (Debian, Ubuntu:" \
            "apt install python3.11-venv python3.11-dev), or install uv, which fetches it."
    new_venv=yes
fi

trap 'echo; fail "interrupted; the same command continues it."' INT TERM
mkdir -p build
: >"$log"
echo "Setting up .venv (once; about 4 minutes on two cores):"
[ -z "${new_venv:-}" ] || step "Python 3.11" create_venv
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    fail "no headers of Python 3.11, which Horovod needs: install them (Debian, Ubuntu:" \
        "apt install python3.11-dev)."
step "packages of requirements.txt" install_packages
step "Horovod" install_horovod
step "SageMaker training toolkit" install_toolkit
step "SageMaker SDK v2" install_sdk_v2
