#!/usr/bin/env bash
# Build the Python environment of a container image, .containers/NAME, from NAME.txt.
#
#     tests/containers/build.sh pytorch-2.12-cu130
#
# Exits with 3, and says why in one line, where this machine lacks what it takes; but in continuous
# integration only the Python version may be lacking.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=$1
file=tests/containers/$name.txt
compiled=tests/containers/$name.compiled.txt # what needs a compiler, if anything does
environment=.containers/$name
log=build/container-$name.log
version=$(sed -n 's/^# Python //p' "$file")
added=$(sed -n 's/^# Jobs add //p' "$file") # by a second call of pip, as a job's start does

missing() {
    echo "container $name left out: $*" >&2
    exit 3
}

# A command can exist and not run: pyenv's shims.
for python in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
    "$python" -c 'import ensurepip' 2>/dev/null && break
    python=
done
[ -n "$python" ] || missing "no Python $version with its venv module."
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [ -e "$compiled" ] && { ! command -v c++ >/dev/null || [ ! -e "$headers/Python.h" ]; }; then
    echo "container $name left out: no C++ compiler, or no headers of Python $version." >&2
    exit $([ -z "${CI:-}" ] && echo 3 || echo 1)
fi

echo "Building $environment (Python $version), once; details in $log"
mkdir -p build
rm -rf "$environment"
exec 3>&2
trap 'tail -n 15 "$log" >&3; echo "$environment could not be built: see $log." >&3; exit 1' ERR
{
    "$python" -m venv "$environment"
    if toolkit=$(grep ^sagemaker-training== "$file") && [ ! -e "$compiled" ]; then
        # Without its C code: scripts/setup.sh says why.
        CC=true "$environment/bin/pip" install --no-cache-dir --no-deps "$toolkit"
        touch "$environment/lib/python$version/site-packages/gethostname.py"
    fi
    "$environment/bin/pip" install -r "$file"
    if [ -n "$added" ]; then
        "$environment/bin/pip" install -r "$added"
        # It must leave the image's own versions as they are: what would bring these back?
        "$environment/bin/pip" install --dry-run --no-deps -r "$file" |
            (! grep "Would install")
    fi
    if [ -e "$compiled" ]; then
        # Horovod 0.27's Gloo is of 2022: what today's Linux headers and compilers ask of it.
        headers=$PWD/$environment/include-linux
        mkdir -p "$headers/linux"
        sed 's/link_mode_masks\[\]/link_mode_masks[0]/' /usr/include/linux/ethtool.h \
            >"$headers/linux/ethtool.h"
        PATH="$PWD/$environment/bin:$PATH" CPLUS_INCLUDE_PATH="$headers" CXXFLAGS="-include array" \
            HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
            HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
            "$environment/bin/pip" install --no-cache-dir --no-build-isolation \
            -r "$compiled"
    fi
} >"$log" 2>&1
touch "$environment/.ready"
